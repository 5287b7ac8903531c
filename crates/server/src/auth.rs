//! Who may ask.

use axum::http::{HeaderMap, header};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::error::ApiError;

/// A key, kept as a digest: comparing two takes the same time whatever they are, and their length is not seen.
#[derive(Clone)]
pub struct ApiKey([u8; 32]);

impl ApiKey {
    /// A key; `None` for an empty one, which anybody would guess.
    pub fn new(key: &str) -> Option<Self> {
        (!key.is_empty()).then(|| Self(digest(key.as_bytes())))
    }

    fn is(&self, given: &[u8]) -> bool {
        self.0.ct_eq(&digest(given)).into()
    }
}

impl std::fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ApiKey")
    }
}

fn digest(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}

/// The names by which the server may be called. A page from the web can make its own name mean this machine, and would
/// reach a server without a key by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hosts {
    /// `localhost` and addresses.
    Local,
    /// Every name.
    Any,
}

/// Whether a request may be answered.
pub fn check(key: Option<&ApiKey>, hosts: Hosts, headers: &HeaderMap) -> Result<(), ApiError> {
    if let Some(key) = key {
        return match given(headers) {
            Some(given) if key.is(given) => Ok(()),
            _ => Err(ApiError::wrong_key()),
        };
    }
    check_name(key, hosts, headers)
}

/// Whether the server may be called so. With a key every name will do.
pub fn check_name(key: Option<&ApiKey>, hosts: Hosts, headers: &HeaderMap) -> Result<(), ApiError> {
    // A request of HTTP/1.0 names no host; browsers always do.
    let host = headers.get(header::HOST).map(|host| host.as_bytes());
    match host {
        Some(host) if key.is_none() && hosts == Hosts::Local && !is_local(host) => {
            Err(ApiError::wrong_host())
        }
        _ => Ok(()),
    }
}

fn given(headers: &HeaderMap) -> Option<&[u8]> {
    if let Some(key) = headers.get("x-api-key") {
        return Some(key.as_bytes());
    }
    let (scheme, key) = headers
        .get(header::AUTHORIZATION)?
        .as_bytes()
        .split_at_checked("Bearer ".len())?;
    scheme
        .eq_ignore_ascii_case(b"Bearer ")
        .then(|| key.trim_ascii())
}

fn is_local(host: &[u8]) -> bool {
    let Ok(host) = std::str::from_utf8(host) else {
        return false;
    };
    let name = match host.strip_prefix('[') {
        Some(v6) => v6.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    name.eq_ignore_ascii_case("localhost") || name.parse::<std::net::IpAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        let pairs = pairs
            .iter()
            .map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap()));
        pairs.collect()
    }

    #[test]
    fn only_the_key_opens() {
        assert!(ApiKey::new("").is_none());
        let key = ApiKey::new("secret").unwrap();
        let allows =
            |pairs: &[(&'static str, &str)]| check(Some(&key), Hosts::Any, &headers(pairs)).is_ok();
        assert!(allows(&[("authorization", "Bearer secret")]));
        assert!(allows(&[("authorization", "bearer secret")]));
        assert!(allows(&[("x-api-key", "secret")]));
        for wrong in [
            "",
            "Bearer",
            "Bearer ",
            "secret",
            "Bearer secre",
            "Bearer secret1",
            "Basic secret",
        ] {
            assert!(!allows(&[("authorization", wrong)]), "{wrong}");
        }
        assert!(!allows(&[]));
        assert!(!format!("{key:?}").contains("secret"));
    }

    #[test]
    fn pages_from_the_web_do_not_get_in_by_a_name_of_their_own() {
        let allows = |hosts, host: &str| check(None, hosts, &headers(&[("host", host)])).is_ok();
        for local in [
            "localhost",
            "LOCALHOST:80",
            "127.0.0.1:8080",
            "[::1]:8080",
            "10.0.0.1",
        ] {
            assert!(allows(Hosts::Local, local), "{local}");
        }
        for other in [
            "example.org",
            "localhost.example.org:8080",
            "127.0.0.1.example.org",
            "",
            "[",
            "::1",
        ] {
            assert!(!allows(Hosts::Local, other), "{other}");
            assert!(allows(Hosts::Any, other), "{other}");
        }
    }
}
