//! Paths, and what each does.

use std::future::{Future, IntoFuture, poll_fn};
use std::net::TcpListener;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, HttpBody};
use axum::extract::{Request, State as Shared};
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::sse::{KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use engine::embed::Pool;
use engine::tokenizer::{Affix, DecodeOptions, EncodeOptions, Specials};
use serde_json::json;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::time::{sleep, timeout, timeout_at};

use crate::answer::{Answer, Kind, Telling};
use crate::answering::Event;
use crate::auth;
use crate::embeddings;
use crate::error::{ApiError, Error, json_response};
use crate::fields::Fields;
use crate::limits;
use crate::listener::Limited;
use crate::messages::{Message, error_json as messages_error};
use crate::page;
use crate::prepare::{Delivery, Form, Prepared, object, prepare, token_ids};
use crate::queue::{self, Job};
use crate::responses::Response as Reply;
use crate::state::{State, unix_s};
use crate::status;
use crate::stream::Events;

type Result<T> = std::result::Result<T, ApiError>;

/// Speaks HTTP until `shutdown` is there or the queue is closed, and everybody has their answer.
pub fn serve(
    listener: TcpListener,
    state: Arc<State>,
    shutdown: impl Future<Output = ()>,
) -> std::result::Result<(), Error> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .max_blocking_threads(limits::PREPARING_MAX)
        .build()
        .map_err(Error::Runtime)?;
    runtime.block_on(async {
        listener.set_nonblocking(true).map_err(Error::Listen)?;
        let listener = tokio::net::TcpListener::from_std(listener).map_err(Error::Listen)?;
        let closed = {
            let state = Arc::clone(&state);
            async move { state.queue.closed().await }
        };
        let serving = axum::serve(Limited::new(listener), router(Arc::clone(&state)))
            .with_graceful_shutdown(closed)
            .into_future();
        let ending = async {
            tokio::select! {
                () = shutdown => state.queue.close(),
                () = state.queue.closed() => {}
            }
            sleep(state.options.grace).await;
            state.cut();
            sleep(Duration::from_secs(limits::LEAVE_S_MAX)).await;
        };
        tokio::select! {
            served = serving => served.map_err(Error::Listen),
            () = ending => {
                tracing::warn!("clients that do not read their answers are left");
                Ok(())
            }
        }
    })
}

fn router(state: Arc<State>) -> Router {
    let wrong_method = || async { ApiError::wrong_method() };
    let open = Router::new()
        .route("/health", get(health))
        .merge(
            // The page itself tells nothing: what it shows it asks for, with the key if there is one.
            Router::new()
                .route("/", get(page::index))
                .route("/page.css", get(page::style))
                .route("/page.js", get(page::script))
                .layer(middleware::from_fn_with_state(
                    Arc::clone(&state),
                    guard_name,
                )),
        )
        .method_not_allowed_fallback(wrong_method);
    let guarded = Router::new()
        .route("/v1/chat/completions", post(chat))
        .route("/v1/completions", post(completion))
        .route("/v1/responses", post(responses))
        .route("/v1/messages", post(messages))
        .route("/v1/messages/count_tokens", post(count_tokens))
        .route("/v1/embeddings", post(embeddings))
        .route("/v1/models", get(models))
        .route("/v1/models/{id}", get(model))
        .route("/v1/plan", get(plan))
        .route("/v1/status", get(status))
        .route("/tokenize", post(tokenize))
        .route("/detokenize", post(detokenize))
        .route("/metrics", get(metrics))
        .method_not_allowed_fallback(wrong_method)
        .fallback(|| async { ApiError::unknown_path() })
        .layer(middleware::from_fn_with_state(Arc::clone(&state), guard));
    open.merge(guarded)
        .layer(middleware::from_fn_with_state(Arc::clone(&state), count))
        .with_state(state)
}

async fn guard(
    Shared(state): Shared<Arc<State>>,
    request: Request,
    next: Next,
) -> Result<Response> {
    let options = &state.options;
    auth::check(options.key.as_ref(), options.hosts, request.headers())?;
    Ok(next.run(request).await)
}

/// The same for who needs no key, but must call the server by its name.
async fn guard_name(
    Shared(state): Shared<Arc<State>>,
    request: Request,
    next: Next,
) -> Result<Response> {
    auth::check_name(
        state.options.key.as_ref(),
        state.options.hosts,
        request.headers(),
    )?;
    Ok(next.run(request).await)
}

async fn count(Shared(state): Shared<Arc<State>>, request: Request, next: Next) -> Response {
    let response = next.run(request).await;
    state.metrics.count_response(response.status());
    response
}

async fn health(Shared(state): Shared<Arc<State>>) -> Result<Response> {
    if state.queue.is_closed() {
        return Err(ApiError::ending());
    }
    Ok(json_response(StatusCode::OK, &json!({"status": "ok"})))
}

async fn metrics(Shared(state): Shared<Arc<State>>) -> Response {
    let text = state.metrics.text(&state);
    let kind = "text/plain; version=0.0.4; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], text).into_response()
}

async fn plan(Shared(state): Shared<Arc<State>>) -> Response {
    json_response(StatusCode::OK, &state.served.plan)
}

async fn status(Shared(state): Shared<Arc<State>>) -> Response {
    json_response(StatusCode::OK, &status::json(&state))
}

fn model_json(state: &State) -> serde_json::Value {
    json!({
        "id": state.served.id,
        "object": "model",
        "created": state.begun_unix_s,
        "owned_by": "spillgate",
        "context_length": state.n_ctx,
    })
}

async fn models(Shared(state): Shared<Arc<State>>) -> Response {
    let list = json!({"object": "list", "data": [model_json(&state)]});
    json_response(StatusCode::OK, &list)
}

async fn model(
    Shared(state): Shared<Arc<State>>,
    axum::extract::Path(id): axum::extract::Path<String>,
) -> Result<Response> {
    if id != state.served.id {
        return Err(ApiError::unknown_model(&id, &state.served.id));
    }
    Ok(json_response(StatusCode::OK, &model_json(&state)))
}

async fn chat(Shared(state): Shared<Arc<State>>, request: Request) -> Result<Response> {
    generate(Form::Chat, state, request).await
}

async fn completion(Shared(state): Shared<Arc<State>>, request: Request) -> Result<Response> {
    generate(Form::Text, state, request).await
}

async fn responses(Shared(state): Shared<Arc<State>>, request: Request) -> Result<Response> {
    generate(Form::Responses, state, request).await
}

async fn messages(Shared(state): Shared<Arc<State>>, request: Request) -> Response {
    let answered = generate(Form::Messages, state, request).await;
    answered.unwrap_or_else(|error| error.respond(&messages_error(&error)))
}

/// How many tokens a request to the Messages API has.
async fn count_tokens(Shared(state): Shared<Arc<State>>, request: Request) -> Response {
    match counted(state, request).await {
        Ok(tokens) => json_response(StatusCode::OK, &json!({"input_tokens": tokens})),
        Err(error) => error.respond(&messages_error(&error)),
    }
}

async fn counted(state: Arc<State>, request: Request) -> Result<usize> {
    let body = body(request, &state).await?;
    aside(move || Ok(prepare(Form::Messages, &body, &state)?.prompt.len())).await
}

/// Texts as vectors.
async fn embeddings(Shared(state): Shared<Arc<State>>, request: Request) -> Result<Response> {
    let deadline = Instant::now() + state.options.timeout;
    let body = body(request, &state).await?;
    let asked = {
        let state = Arc::clone(&state);
        aside(move || embeddings::read(&body, &state)).await?
    };
    let mut vectors = Vec::with_capacity(asked.inputs.len());
    let mut tokens = 0;
    // No more than are computed side by side, so that long lists leave the queue to others.
    for inputs in asked.inputs.chunks(state.options.parallel) {
        let (sender, mut events) = unbounded_channel();
        for (i, input) in inputs.iter().enumerate() {
            let reply = queue::Reply {
                choice: i,
                sender: sender.clone(),
            };
            let job = embeddings::job(&state, input, deadline, reply)?;
            state.queue.push(job)?;
        }
        drop(sender);
        let mut pools: Vec<Option<Pool>> = vec![None; inputs.len()];
        while pools.iter().any(Option::is_none) {
            match timeout_at(deadline.into(), events.recv()).await {
                Err(_) => return Err(ApiError::timeout(state.options.timeout.as_secs())),
                Ok(None) => return Err(ApiError::ended_early()),
                Ok(Some((_, Event::Failed(error)))) => return Err(error),
                Ok(Some((i, Event::Embedded(pool, n)))) => {
                    tokens += n;
                    pools[i] = Some(pool);
                }
                Ok(Some(_)) => {}
            }
        }
        vectors.extend(
            pools
                .iter()
                .flatten()
                .map(|pool| pool.vector(asked.dimensions)),
        );
    }
    let answer = embeddings::answer(&state.served.id, &vectors, asked.encoding, tokens);
    Ok(json_response(StatusCode::OK, &answer))
}

/// The body of a request, which says that it is JSON: a page from elsewhere can send other kinds without being asked.
async fn body(request: Request, state: &State) -> Result<Vec<u8>> {
    let kind = request.headers().get(header::CONTENT_TYPE);
    let kind = kind.and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let essence = kind.split(';').next().unwrap_or_default().trim();
    if !essence.eq_ignore_ascii_case("application/json") {
        return Err(ApiError::not_json());
    }
    let bytes_max = limits::body_bytes_max(state.n_ctx);
    let patience = Duration::from_secs(limits::BODY_S_MAX);
    timeout(patience, read(request.into_body(), bytes_max))
        .await
        .unwrap_or_else(|_| Err(ApiError::body_too_slow()))
}

/// What a body has, if that is not too much. More is read all the same, to a bound, and dropped: a client that still sends
/// would not see the refusal.
async fn read(body: Body, bytes_max: usize) -> Result<Vec<u8>> {
    let mut body = pin!(body);
    let mut bytes = Vec::new();
    let mut seen = 0;
    while let Some(frame) = poll_fn(|context| body.as_mut().poll_frame(context)).await {
        let frame = frame.map_err(|_| ApiError::invalid("the body ended early"))?;
        let Ok(data) = frame.into_data() else {
            continue;
        };
        seen += data.len();
        if seen <= bytes_max {
            bytes.extend_from_slice(&data);
        } else {
            bytes = Vec::new();
        }
        if seen > limits::BODY_BYTES_READ_MAX {
            break;
        }
    }
    if seen > bytes_max {
        return Err(ApiError::body_too_large(bytes_max));
    }
    Ok(bytes)
}

/// Work that would hold the thread that speaks HTTP.
async fn aside<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|_| Err(ApiError::internal("the request could not be read")))
}

async fn generate(form: Form, state: Arc<State>, request: Request) -> Result<Response> {
    let deadline = Instant::now() + state.options.timeout;
    let body = body(request, &state).await?;
    let prepared = {
        let state = Arc::clone(&state);
        aside(move || prepare(form, &body, &state)).await?
    };
    let Prepared {
        prompt,
        tokens_max,
        stop,
        choices,
        logprobs,
        expected,
        delivery,
        usage,
        asked,
    } = prepared;
    let looks_for_calls = !expected.tools.is_empty() || expected.has_channels;
    // What it borrows must be gone before anything is waited for.
    let telling = {
        let (model, now) = (state.served.id.clone(), unix_s());
        let id = |prefix| state.answer_id(prefix);
        let (n, with_logprobs) = (choices.len(), logprobs.is_some());
        let of_text = |kind, id| {
            let model = model.clone();
            Answer::new(kind, id, now, model, usage, with_logprobs, &expected, n)
        };
        let telling: Box<dyn Telling> = match form {
            Form::Chat => Box::new(of_text(Kind::Chat, id("chatcmpl"))),
            Form::Text => Box::new(of_text(Kind::Text, id("cmpl"))),
            Form::Responses => Box::new(Reply::new(id("resp"), now, model, asked, expected)),
            Form::Messages => Box::new(Message::new(id("msg"), model, stop.clone(), expected)),
        };
        telling
    };
    let (sender, mut events) = unbounded_channel();
    for (choice, own) in choices.into_iter().enumerate() {
        state.queue.push(Job {
            prompt: prompt.clone(),
            tokens_max,
            stop: stop.clone(),
            sampler: own.sampler,
            logprobs,
            deadline,
            constraint: own.constraint,
            marks: if looks_for_calls {
                Arc::clone(&state.marks)
            } else {
                Arc::default()
            },
            pool: None,
            reply: queue::Reply {
                choice,
                sender: sender.clone(),
            },
        })?;
    }
    drop(sender);
    // Once it begins, the worker minds the time.
    match timeout_at(deadline.into(), events.recv()).await {
        Err(_) => return Err(ApiError::timeout(state.options.timeout.as_secs())),
        Ok(None) => return Err(ApiError::ended_early()),
        Ok(Some((_, Event::Failed(error)))) => return Err(error),
        Ok(Some(_)) => {}
    }
    match delivery {
        Delivery::Whole => whole(&state, telling, events).await,
        Delivery::Streamed => Ok(Sse::new(Events::new(state, telling, events))
            .keep_alive(KeepAlive::default())
            .into_response()),
    }
}

async fn whole(
    state: &State,
    mut telling: Box<dyn Telling>,
    mut events: UnboundedReceiver<(usize, Event)>,
) -> Result<Response> {
    let tokenizer = &state.served.tokenizer;
    // What would be sent, if it were streamed.
    let mut sent = Vec::new();
    while !telling.is_complete() {
        match events.recv().await {
            // An embedding is no answer.
            Some((_, Event::Begun | Event::Embedded(..))) => {}
            Some((choice, Event::Piece(piece))) => {
                telling.piece(choice, &piece, tokenizer, &mut sent);
            }
            Some((choice, Event::Done(done))) => telling.done(choice, done, &mut sent),
            Some((_, Event::Failed(error))) => return Err(error),
            None => return Err(ApiError::ended_early()),
        }
        sent.clear();
    }
    Ok(json_response(StatusCode::OK, &telling.whole(tokenizer)))
}

/// Text to tokens.
async fn tokenize(Shared(state): Shared<Arc<State>>, request: Request) -> Result<Response> {
    let body = body(request, &state).await?;
    aside(move || {
        let object = object(&body)?;
        let fields = Fields(&object);
        let text = match fields.text("content")? {
            Some(text) => text,
            None => fields
                .text("prompt")?
                .ok_or_else(|| ApiError::field("content", "'content': expected a text"))?,
        };
        let options = EncodeOptions {
            specials: match fields.get("parse_special") {
                Some(_) if !fields.flag("parse_special")? => Specials::Text,
                _ => Specials::Parse,
            },
            ..if fields.flag("add_special")? {
                EncodeOptions::default()
            } else {
                EncodeOptions {
                    bos: Affix::Never,
                    eos: Affix::Never,
                    ..EncodeOptions::default()
                }
            }
        };
        let tokens = state.served.tokenizer.encode(text, options);
        let tokens = tokens.map_err(|e| ApiError::field("content", e.to_string()))?;
        let answer = json!({"tokens": tokens, "count": tokens.len()});
        Ok(json_response(StatusCode::OK, &answer))
    })
    .await
}

/// Tokens to text.
async fn detokenize(Shared(state): Shared<Arc<State>>, request: Request) -> Result<Response> {
    let body = body(request, &state).await?;
    aside(move || {
        let object = object(&body)?;
        let tokenizer = &state.served.tokenizer;
        let ids = Fields(&object)
            .list("tokens")?
            .ok_or_else(|| ApiError::field("tokens", "'tokens': expected a list of token ids"))?;
        let ids = token_ids("tokens", ids, tokenizer)?;
        let options = DecodeOptions {
            control: engine::tokenizer::ControlText::Show,
            ..DecodeOptions::default()
        };
        let text = tokenizer.decode(&ids, options);
        let text = text.map_err(|e| ApiError::field("tokens", e.to_string()))?;
        let answer = json!({"content": String::from_utf8_lossy(&text)});
        Ok(json_response(StatusCode::OK, &answer))
    })
    .await
}
