//! What goes wrong: with the server, and with a request.

use std::io;

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::limits;

/// Why the server ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The socket cannot be listened on.
    #[error("cannot listen: {0}")]
    Listen(#[source] io::Error),
    /// The system would not start a thread.
    #[error("cannot start a thread: {0}")]
    Thread(#[source] io::Error),
    /// There are no sockets or timers to wait for.
    #[error("cannot wait for sockets and timers: {0}")]
    Runtime(#[source] io::Error),
}

/// Why a request has no answer, as the API says it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiError {
    pub status: StatusCode,
    kind: &'static str,
    code: Option<&'static str>,
    param: Option<String>,
    message: String,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self {
            status,
            kind,
            code: None,
            param: None,
            message: message.into(),
        }
    }

    fn coded(self, code: &'static str) -> Self {
        Self {
            code: Some(code),
            ..self
        }
    }

    /// The request makes no sense.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// A field of the request makes no sense.
    pub fn field(name: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            param: Some(name.into()),
            ..Self::invalid(message)
        }
    }

    /// The API knows this, the server does not.
    pub fn unsupported(name: &str, message: impl Into<String>) -> Self {
        Self::field(name, message).coded("unsupported_parameter")
    }

    pub fn too_long(tokens: usize, n_ctx: usize) -> Self {
        let message = format!(
            "the prompt has {tokens} tokens; the context holds {n_ctx}, one of which the answer needs"
        );
        Self::invalid(message).coded("context_length_exceeded")
    }

    pub fn body_too_large(bytes_max: usize) -> Self {
        let message = format!("the body has more than {bytes_max} bytes, which no context holds");
        Self::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            "invalid_request_error",
            message,
        )
        .coded("request_too_large")
    }

    pub fn body_too_slow() -> Self {
        let message = format!("the body took more than {} s", limits::BODY_S_MAX);
        Self::new(
            StatusCode::REQUEST_TIMEOUT,
            "invalid_request_error",
            message,
        )
    }

    pub fn not_json() -> Self {
        let message = "expected a body of Content-Type application/json";
        Self::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "invalid_request_error",
            message,
        )
    }

    pub fn wrong_key() -> Self {
        let message =
            "a key is needed, as in 'Authorization: Bearer KEY', and it must be the right one";
        Self::new(StatusCode::UNAUTHORIZED, "authentication_error", message)
            .coded("invalid_api_key")
    }

    pub fn wrong_host() -> Self {
        let message = "without a key the server answers to 'localhost' and to addresses alone, lest a web page reach it by another name";
        Self::new(StatusCode::FORBIDDEN, "permission_error", message)
    }

    pub fn unknown_model(asked: &str, id: &str) -> Self {
        // What was asked for may be anything; what is shown of it is short.
        let asked: String = asked.chars().take(80).collect();
        let message = format!("there is no model '{asked}' here; this server has '{id}'");
        Self {
            param: Some("model".to_owned()),
            ..Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message)
        }
        .coded("model_not_found")
    }

    /// What the model is not for.
    pub fn no_embeddings() -> Self {
        let message = "this model was made to continue text, not for embeddings; 'spillgate serve --pooling' makes some all the same";
        Self::invalid(message).coded("unsupported_model")
    }

    pub fn unknown_path() -> Self {
        let message = "there is nothing at this path";
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message)
    }

    pub fn wrong_method() -> Self {
        let message = "this path takes another method";
        Self::new(
            StatusCode::METHOD_NOT_ALLOWED,
            "invalid_request_error",
            message,
        )
    }

    pub fn queue_full(waiting: usize) -> Self {
        let message = format!("{waiting} requests wait already; try again later");
        Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message).coded("queue_full")
    }

    pub fn ending() -> Self {
        let message = "the server is shutting down";
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message).coded("shutting_down")
    }

    pub fn timeout(seconds: u64) -> Self {
        let message = format!("the request took longer than {seconds} s");
        Self::new(StatusCode::GATEWAY_TIMEOUT, "server_error", message).coded("timeout")
    }

    /// Something here is broken.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
    }

    /// The thread that computes is gone, which only a bug can cause.
    pub fn ended_early() -> Self {
        Self::internal("the answer ended early")
    }

    pub fn message(&self) -> &str {
        &self.message
    }

    /// As in a body.
    pub fn json(&self) -> Value {
        json!({"error": {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }})
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let json = self.json();
        self.respond(&json)
    }
}

impl ApiError {
    /// A response whose body says it as some API does.
    pub fn respond(&self, json: &Value) -> Response {
        let mut response = json_response(self.status, json);
        let retry = matches!(
            self.status,
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE
        );
        if retry {
            response
                .headers_mut()
                .insert(header::RETRY_AFTER, HeaderValue::from(limits::RETRY_S));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response
                .headers_mut()
                .insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

/// A response of JSON.
pub fn json_response(status: StatusCode, value: &Value) -> Response {
    let json = HeaderValue::from_static("application/json");
    (status, [(header::CONTENT_TYPE, json)], value.to_string()).into_response()
}
