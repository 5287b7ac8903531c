//! An answer as it comes: server-sent events.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use axum::response::sse;
use futures_core::Stream;
use serde_json::Value;
use tokio::sync::mpsc::UnboundedReceiver;

use crate::answer::Answer;
use crate::answering::Event;
use crate::error::ApiError;
use crate::prepare::Usage;
use crate::state::State;

/// The events of an answer. Dropping it, as happens when the client leaves, ends the computation.
#[derive(Debug)]
pub struct Events {
    state: Arc<State>,
    answer: Answer,
    usage: Usage,
    from_worker: UnboundedReceiver<Event>,
    /// Those that are ready to be sent.
    ready: VecDeque<sse::Event>,
    is_complete: bool,
}

impl Events {
    pub fn new(
        state: Arc<State>,
        answer: Answer,
        usage: Usage,
        from_worker: UnboundedReceiver<Event>,
    ) -> Self {
        let mut ready = VecDeque::new();
        ready.extend(answer.first_chunk().map(|chunk| data(&chunk)));
        Self {
            state,
            answer,
            usage,
            from_worker,
            ready,
            is_complete: false,
        }
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::Begun => {}
            Event::Piece(piece) => {
                let tokenizer = &self.state.served.tokenizer;
                self.ready
                    .push_back(data(&self.answer.text_chunk(&piece, tokenizer)));
            }
            Event::Done(done) => {
                self.ready.push_back(data(&self.answer.last_chunk(&done)));
                if self.usage == Usage::Told {
                    self.ready.push_back(data(&self.answer.usage_chunk(&done)));
                }
                self.ready.push_back(sse::Event::default().data("[DONE]"));
                self.is_complete = true;
            }
            Event::Failed(error) => {
                self.ready.push_back(data(&error.json()));
                self.is_complete = true;
            }
        }
    }
}

fn data(value: &Value) -> sse::Event {
    sse::Event::default().data(value.to_string())
}

impl Stream for Events {
    type Item = Result<sse::Event, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Poll::Ready(Some(Ok(event)));
            }
            if self.is_complete {
                return Poll::Ready(None);
            }
            let event = ready!(self.from_worker.poll_recv(context));
            self.take(event.unwrap_or_else(|| Event::Failed(ApiError::ended_early())));
        }
    }
}
