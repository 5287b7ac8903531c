//! One GET with range and redirects. Says whether an answer continues what is there or begins anew.

use ureq::http::{HeaderMap, Response};

use super::super::FetchError;
use super::super::limits::{CONNECT_MAX, HEADER_BYTES_MAX, REDIRECTS_MAX, REQUEST_MAX};
use super::Failure;

/// The body of an answer.
pub type Body = ureq::BodyReader<'static>;

/// An answer whose body can be appended to the file.
pub struct Start {
    /// Byte of the file at which the body begins.
    pub start_bytes: u64,
    /// Bytes of the whole file.
    pub total_bytes: u64,
    /// The strong entity tag by which a later request can continue.
    pub tag: Option<String>,
    /// The SHA-256 that the hub announces for the whole file.
    pub sha256: Option<String>,
    /// The bytes.
    pub body: Body,
}

/// Sends requests to one hub; its token goes nowhere else.
pub struct Client {
    agent: ureq::Agent,
    origin: String,
    token: Option<String>,
}

impl Client {
    pub fn new(endpoint: &str, token: Option<&str>) -> Self {
        let agent = ureq::Agent::config_builder()
            // Statuses and redirects are handled here: the announced digest comes with the redirect.
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_connect(Some(CONNECT_MAX))
            .timeout_recv_response(Some(CONNECT_MAX))
            .timeout_global(Some(REQUEST_MAX))
            .user_agent(concat!("spillgate/", env!("CARGO_PKG_VERSION")))
            .build()
            .new_agent();
        Self {
            agent,
            origin: origin(endpoint).to_owned(),
            token: token.map(str::to_owned),
        }
    }

    /// Asks for a file from byte `resume.0` on, if it still has the tag `resume.1`, else from the start.
    pub fn get(&self, url: &str, resume: Option<(u64, &str)>) -> Result<Start, Failure> {
        let mut at = url.to_owned();
        let mut sha256 = None;
        for _ in 0..=REDIRECTS_MAX {
            let answer = self.send(&at, resume)?;
            sha256 = sha256.or_else(|| announced_sha256(answer.headers()));
            if !answer.status().is_redirection() {
                return accept(url, answer, resume, sha256);
            }
            at = redirect_target(&at, answer.headers()).map_err(|why| bad(url, why))?;
        }
        Err(bad(url, format!("more than {REDIRECTS_MAX} redirects")).into())
    }

    fn send(
        &self,
        url: &str,
        resume: Option<(u64, &str)>,
    ) -> Result<Response<ureq::Body>, Failure> {
        let mut request = self.agent.get(url).header("Accept-Encoding", "identity");
        if let Some(token) = self.token.as_deref().filter(|_| origin(url) == self.origin) {
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        if let Some((done_bytes, tag)) = resume {
            request = request
                .header("Range", format!("bytes={done_bytes}-"))
                .header("If-Range", tag);
        }
        request.call().map_err(|e| match e {
            ureq::Error::BadUri(_) | ureq::Error::Http(_) | ureq::Error::RequireHttpsOnly(_) => {
                bad(url, format!("cannot be asked for: {e}")).into()
            }
            e => Failure::Passing {
                detail: e.to_string(),
                never_reached: true,
            },
        })
    }
}

fn bad(url: &str, why: String) -> FetchError {
    FetchError::Http {
        url: url.to_owned(),
        why,
    }
}

fn accept(
    url: &str,
    answer: Response<ureq::Body>,
    resume: Option<(u64, &str)>,
    sha256: Option<String>,
) -> Result<Start, Failure> {
    let headers = answer.headers();
    let (start_bytes, total_bytes) = match answer.status().as_u16() {
        200 => {
            let total = header(headers, "content-length").and_then(|v| v.parse().ok());
            (
                0,
                total.ok_or_else(|| {
                    bad(
                        url,
                        "the answer does not say how long the file is".to_owned(),
                    )
                })?,
            )
        }
        206 => {
            let asked = resume.map_or(0, |(done_bytes, _)| done_bytes);
            let range = header(headers, "content-range").unwrap_or("none");
            match content_range(range) {
                Some((start, total)) if start == asked => (start, total),
                _ => {
                    let why = format!(
                        "asked for the bytes from {asked} on, was given the range '{range}'"
                    );
                    return Err(Failure::NoResume(why));
                }
            }
        }
        // What is there is as long as the file or longer.
        416 => {
            let range = header(headers, "content-range").unwrap_or("none");
            let total = range.strip_prefix("bytes */").and_then(|t| t.parse().ok());
            match (total, resume) {
                (Some(total), Some((done_bytes, _))) if total == done_bytes => (total, total),
                _ => {
                    return Err(Failure::NoResume(format!(
                        "no such range (HTTP 416, '{range}')"
                    )));
                }
            }
        }
        status @ (401 | 403) => {
            return Err(FetchError::Denied {
                url: url.to_owned(),
                status,
            }
            .into());
        }
        404 => {
            return Err(FetchError::NotFound {
                url: url.to_owned(),
            }
            .into());
        }
        status @ (408 | 429 | 500..=599) => {
            return Err(Failure::Passing {
                detail: format!("HTTP {status}"),
                never_reached: false,
            });
        }
        status => return Err(bad(url, format!("HTTP {status}, expected 200 or 206")).into()),
    };
    let tag = header(headers, "etag")
        .filter(|t| t.starts_with('"'))
        .map(str::to_owned);
    Ok(Start {
        start_bytes,
        total_bytes,
        tag,
        sha256,
        body: answer.into_body().into_reader(),
    })
}

fn header<'h>(headers: &'h HeaderMap, name: &str) -> Option<&'h str> {
    headers
        .get(name)?
        .to_str()
        .ok()
        .filter(|v| v.len() <= HEADER_BYTES_MAX)
        .map(str::trim)
}

/// The hub names large files by their SHA-256, in a header of its first answer.
fn announced_sha256(headers: &HeaderMap) -> Option<String> {
    let tag = header(headers, "x-linked-etag")?.trim_matches('"');
    (tag.len() == 64 && tag.bytes().all(|b| b.is_ascii_hexdigit()))
        .then(|| tag.to_ascii_lowercase())
}

/// `bytes 5-9/10` as 5 and 10, if it runs to the end.
fn content_range(value: &str) -> Option<(u64, u64)> {
    let (range, total) = value.strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let (first, last, total): (u64, u64, u64) =
        (first.parse().ok()?, last.parse().ok()?, total.parse().ok()?);
    (first <= last && last.checked_add(1) == Some(total)).then_some((first, total))
}

/// Scheme and host of an address.
fn origin(url: &str) -> &str {
    let host = url.find("://").map_or(0, |i| i + 3);
    url[host..]
        .find(['/', '?', '#'])
        .map_or(url, |i| &url[..host + i])
}

fn redirect_target(from: &str, headers: &HeaderMap) -> Result<String, String> {
    let location = header(headers, "location").ok_or("a redirect that leads nowhere")?;
    let target = if location.starts_with('/') && !location.starts_with("//") {
        format!("{}{location}", origin(from))
    } else {
        location.to_owned()
    };
    let secure = target.starts_with("https://");
    if secure || (target.starts_with("http://") && from.starts_with("http://")) {
        Ok(target)
    } else {
        Err(format!(
            "a redirect to '{location}', expected an https address"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_read_strictly() {
        assert_eq!(content_range("bytes 5-9/10"), Some((5, 10)));
        assert_eq!(content_range("bytes 0-0/1"), Some((0, 1)));
        let max = format!("bytes 0-{}/0", u64::MAX);
        for bad in [
            "bytes 5-8/10",
            "bytes 9-5/10",
            "bytes 5-9/*",
            "5-9/10",
            "bytes */10",
            "bytes -1-9/10",
            "",
            &max,
        ] {
            assert_eq!(content_range(bad), None, "{bad}");
        }
    }

    #[test]
    fn redirects_keep_to_https_and_the_token_to_its_host() {
        let to = |location: &str, from: &str| {
            let mut headers = HeaderMap::new();
            headers.insert("location", location.parse().unwrap());
            redirect_target(from, &headers)
        };
        assert_eq!(to("/x?y", "https://a.b/c/d").unwrap(), "https://a.b/x?y");
        assert_eq!(
            to("https://c.d/e", "https://a.b/c").unwrap(),
            "https://c.d/e"
        );
        assert!(to("http://c.d/e", "https://a.b/c").is_err());
        assert!(to("//c.d/e", "https://a.b/c").is_err());
        assert!(to("file:///etc/passwd", "https://a.b/c").is_err());
        assert_eq!(origin("https://a.b:1/c"), "https://a.b:1");
        assert_eq!(origin("https://a.b"), "https://a.b");
        assert_ne!(origin("https://a.b.evil/c"), origin("https://a.b"));
        assert_ne!(origin("https://a.b@evil/c"), origin("https://a.b"));
    }
}
