//! Requests that wait for the thread that computes.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use engine::embed::Pool;
use engine::sampler::Sampler;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::watch;

use crate::answering::Event;
use crate::constraint::Constraint;
use crate::error::ApiError;

/// A request that is ready to be computed.
#[derive(Debug)]
pub struct Job {
    pub prompt: Vec<u32>,
    pub tokens_max: Option<usize>,
    pub stop: Vec<String>,
    pub sampler: Sampler,
    /// How many of the likeliest tokens are listed for each token; `None`: probabilities are not asked for.
    pub logprobs: Option<usize>,
    pub deadline: Instant,
    /// What the answer has to follow.
    pub constraint: Option<Constraint>,
    /// Control tokens whose text is shown.
    pub marks: Arc<Vec<(u32, &'static str)>>,
    /// What takes the outputs, if an embedding is wanted and no answer.
    pub pool: Option<Pool>,
    pub reply: Reply,
}

/// Where the events of one of a request's answers go.
#[derive(Debug, Clone)]
pub struct Reply {
    pub choice: usize,
    pub sender: UnboundedSender<(usize, Event)>,
}

impl Reply {
    /// Tells the client, if it is still there.
    pub fn send(&self, event: Event) {
        // Whether anybody hears it is asked before each token.
        let _ = self.sender.send((self.choice, event));
    }

    /// Whether the client left.
    pub fn is_closed(&self) -> bool {
        self.sender.is_closed()
    }
}

/// First in, first out, and not more than so many.
#[derive(Debug)]
pub struct Queue {
    len_max: usize,
    inner: Mutex<Inner>,
    changed: Condvar,
    closed: watch::Sender<bool>,
}

#[derive(Debug, Default)]
struct Inner {
    jobs: VecDeque<Job>,
    is_closed: bool,
}

impl Queue {
    pub fn new(len_max: usize) -> Self {
        Self {
            len_max,
            inner: Mutex::default(),
            changed: Condvar::new(),
            closed: watch::Sender::new(false),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // A thread that panicked left a list of jobs.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a request at the end. Those whose clients left make room.
    pub fn push(&self, job: Job) -> Result<(), ApiError> {
        let mut inner = self.lock();
        if inner.is_closed {
            return Err(ApiError::ending());
        }
        if inner.jobs.len() >= self.len_max {
            inner.jobs.retain(|job| !job.reply.is_closed());
        }
        if inner.jobs.len() >= self.len_max {
            return Err(ApiError::queue_full(inner.jobs.len()));
        }
        inner.jobs.push_back(job);
        self.changed.notify_one();
        Ok(())
    }

    /// Waits for a request; `None`: there will be none.
    pub fn take(&self) -> Option<Job> {
        let mut inner = self.lock();
        loop {
            if let Some(job) = inner.jobs.pop_front() {
                return Some(job);
            }
            if inner.is_closed {
                return None;
            }
            inner = self
                .changed
                .wait(inner)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// A request, if one waits.
    pub fn try_take(&self) -> Option<Job> {
        self.lock().jobs.pop_front()
    }

    /// Takes no more requests, and tells those that wait.
    pub fn close(&self) {
        let waiting = {
            let mut inner = self.lock();
            inner.is_closed = true;
            std::mem::take(&mut inner.jobs)
        };
        for job in waiting {
            job.reply.send(Event::Failed(ApiError::ending()));
        }
        self.changed.notify_all();
        self.closed.send_replace(true);
    }

    /// Until it is closed.
    pub async fn closed(&self) {
        let mut closed = self.closed.subscribe();
        // The sender lives as long as the queue.
        let _ = closed.wait_for(|&closed| closed).await;
    }

    pub fn is_closed(&self) -> bool {
        *self.closed.borrow()
    }

    /// Requests that wait.
    pub fn len(&self) -> usize {
        self.lock().jobs.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::sampler::SamplerParams;
    use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

    fn job(token: u32) -> (Job, UnboundedReceiver<(usize, Event)>) {
        let (sender, events) = unbounded_channel();
        let job = Job {
            prompt: vec![token],
            tokens_max: None,
            stop: Vec::new(),
            sampler: Sampler::new(SamplerParams::greedy(), 4).unwrap(),
            logprobs: None,
            deadline: Instant::now(),
            constraint: None,
            marks: Arc::new(Vec::new()),
            pool: None,
            reply: Reply { choice: 0, sender },
        };
        (job, events)
    }

    #[test]
    fn it_holds_no_more_than_it_may_and_those_who_left_make_room() {
        let queue = Queue::new(2);
        let (one, left) = job(1);
        let (two, _two) = job(2);
        let (three, _three) = job(3);
        queue.push(one).unwrap();
        queue.push(two).unwrap();
        let (refused, _events) = job(9);
        let error = queue.push(refused).unwrap_err();
        assert_eq!(error, ApiError::queue_full(2));
        drop(left);
        queue.push(three).unwrap();
        let order: Vec<u32> = (0..2).map(|_| queue.take().unwrap().prompt[0]).collect();
        assert_eq!(order, [2, 3]);
    }

    #[test]
    fn a_closed_one_tells_who_waits_and_takes_nobody() {
        let queue = Queue::new(2);
        let (one, mut events) = job(1);
        queue.push(one).unwrap();
        queue.close();
        assert_eq!(
            events.try_recv(),
            Ok((0, Event::Failed(ApiError::ending())))
        );
        assert!(queue.take().is_none());
        let (late, _events) = job(2);
        assert_eq!(queue.push(late).unwrap_err(), ApiError::ending());
    }
}
