//! An answer as it comes: server-sent events.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use axum::response::sse;
use futures_core::Stream;
use tokio::sync::mpsc::UnboundedReceiver;

use crate::answer::{Sent, Telling};
use crate::answering::Event;
use crate::error::ApiError;
use crate::state::State;

/// The events of an answer. Dropping it, as happens when the client leaves, ends the computation.
pub struct Events {
    state: Arc<State>,
    telling: Box<dyn Telling>,
    from_worker: UnboundedReceiver<(usize, Event)>,
    /// Those that are ready to be sent.
    ready: VecDeque<Sent>,
    is_complete: bool,
}

impl Events {
    pub fn new(
        state: Arc<State>,
        mut telling: Box<dyn Telling>,
        from_worker: UnboundedReceiver<(usize, Event)>,
    ) -> Self {
        let mut sent = Vec::new();
        telling.begin(&mut sent);
        Self {
            state,
            telling,
            from_worker,
            ready: sent.into(),
            is_complete: false,
        }
    }

    fn take(&mut self, choice: usize, event: Event) {
        let mut sent = Vec::new();
        match event {
            // Embeddings are not streamed.
            Event::Begun | Event::Embedded(..) => {}
            Event::Piece(piece) => {
                let tokenizer = &self.state.served.tokenizer;
                self.telling.piece(choice, &piece, tokenizer, &mut sent);
            }
            Event::Done(done) => {
                self.telling.done(choice, done, &mut sent);
                self.is_complete = self.telling.is_complete();
            }
            Event::Failed(error) => {
                self.telling.failed(&error, &mut sent);
                self.is_complete = true;
            }
        }
        self.ready.extend(sent);
    }
}

fn event(sent: &Sent) -> sse::Event {
    let event = sse::Event::default().data(&sent.data);
    match sent.name {
        Some(name) => event.event(name),
        None => event,
    }
}

impl Stream for Events {
    type Item = Result<sse::Event, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Some(sent) = self.ready.pop_front() {
                return Poll::Ready(Some(Ok(event(&sent))));
            }
            if self.is_complete {
                return Poll::Ready(None);
            }
            let next = ready!(self.from_worker.poll_recv(context));
            let (choice, event) = next.unwrap_or((0, Event::Failed(ApiError::ended_early())));
            self.take(choice, event);
        }
    }
}
