//! Downloads from a small server in this file that answers as each test tells it to.

use std::io::{BufRead, BufReader, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use tempfile::TempDir;

use super::super::limits::RESTARTS_MAX;
use super::*;

/// What a client asked.
#[derive(Debug, Clone, Default)]
struct Request {
    path: String,
    range_from: Option<usize>,
    if_range: Option<String>,
    token: Option<String>,
}

/// What to answer: head lines, a body, and how many bytes of it are sent before the connection is cut.
struct Answer {
    head: String,
    body: Vec<u8>,
    sent: usize,
}

impl Answer {
    fn new(head: &str, body: &[u8]) -> Self {
        Self {
            head: head.to_owned(),
            body: body.to_vec(),
            sent: usize::MAX,
        }
    }

    fn cut_after(mut self, bytes: usize) -> Self {
        self.sent = bytes;
        self
    }
}

type Log = Arc<Mutex<Vec<Request>>>;

/// Serves until the test's process ends.
fn serve(answer: impl Fn(usize, &Request) -> Answer + Send + 'static) -> (String, Log) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let log = Log::default();
    let seen = log.clone();
    thread::spawn(move || {
        for (number, stream) in listener.incoming().enumerate() {
            let mut stream = stream.unwrap();
            let request = read_request(&stream);
            seen.lock().unwrap().push(request.clone());
            let Answer { head, body, sent } = answer(number, &request);
            // The client may hang up first; then there is nobody to tell.
            let _ = write!(
                stream,
                "HTTP/1.1 {head}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
                body.len()
            );
            let _ = stream.write_all(&body[..sent.min(body.len())]);
            let _ = stream.shutdown(Shutdown::Both);
        }
    });
    (address, log)
}

fn read_request(stream: &TcpStream) -> Request {
    let mut request = Request::default();
    for (number, line) in BufReader::new(stream)
        .lines()
        .map_while(Result::ok)
        .enumerate()
    {
        if line.is_empty() {
            break;
        }
        if number == 0 {
            request.path = line.split(' ').nth(1).unwrap_or_default().to_owned();
        }
        let Some((name, value)) = line.split_once(": ") else {
            continue;
        };
        match name.to_ascii_lowercase().as_str() {
            "range" => {
                let from = value
                    .strip_prefix("bytes=")
                    .and_then(|v| v.strip_suffix('-'));
                request.range_from = from.map(|f| f.parse().unwrap());
            }
            "if-range" => request.if_range = Some(value.to_owned()),
            "authorization" => request.token = Some(value.to_owned()),
            _ => {}
        }
    }
    request
}

fn gguf(len: usize) -> Vec<u8> {
    let noise = (0..len - 4).map(|i| (i * i / 7) as u8);
    b"GGUF".iter().copied().chain(noise).collect()
}

/// A well-behaved server: honours the range if the tag is still right.
fn polite(request: &Request, file: &[u8], tag: &str) -> Answer {
    match request.range_from {
        Some(from) if request.if_range.as_deref() == Some(tag) => {
            let head = format!(
                "206 Partial\r\nETag: {tag}\r\nContent-Range: bytes {from}-{}/{}",
                file.len() - 1,
                file.len()
            );
            Answer::new(&head, &file[from..])
        }
        _ => Answer::new(&format!("200 OK\r\nETag: {tag}"), file),
    }
}

struct Setup {
    dir: TempDir,
    hub: Hub,
    log: Log,
}

impl Setup {
    fn new(answer: impl Fn(usize, &Request) -> Answer + Send + 'static) -> Self {
        let (address, log) = serve(answer);
        Self {
            dir: TempDir::new().unwrap(),
            hub: Hub::new(address, Some("secret".to_owned())),
            log,
        }
    }

    fn pull(&self, spec: &str) -> Result<PathBuf, FetchError> {
        self.hub
            .pull(self.dir.path(), &HubFile::parse(spec).unwrap(), &mut ())
    }

    fn log(&self) -> Vec<Request> {
        self.log.lock().unwrap().clone()
    }

    /// Everything in the folder of `hf:o/r/` but locks.
    fn left(&self) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(self.dir.path().join("hf/o/r"))
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .filter(|n| !n.ends_with(".lock"))
            .collect();
        names.sort();
        names
    }
}

const SPEC: &str = "hf:o/r/m.gguf";

#[test]
fn a_file_comes_whole_and_a_second_pull_asks_nobody() {
    let file = gguf(300_000);
    let expected = file.clone();
    let setup = Setup::new(move |_, r| polite(r, &file, "\"v1\""));
    let path = setup.pull(SPEC).unwrap();
    assert_eq!(fs::read(&path).unwrap(), expected);
    assert_eq!(setup.left(), ["m.gguf"]);
    assert_eq!(setup.pull(SPEC).unwrap(), path);
    let log = setup.log();
    assert_eq!(log.len(), 1);
    assert_eq!(log[0].path, "/o/r/resolve/main/m.gguf");
    assert_eq!(log[0].token.as_deref(), Some("Bearer secret"));
}

#[test]
fn a_cut_connection_is_resumed_where_it_broke() {
    let file = gguf(300_000);
    let expected = file.clone();
    let setup = Setup::new(move |number, r| {
        let answer = polite(r, &file, "\"v1\"");
        if number < 2 {
            answer.cut_after(100_000)
        } else {
            answer
        }
    });
    let path = setup.pull(SPEC).unwrap();
    assert_eq!(fs::read(path).unwrap(), expected);
    let from: Vec<_> = setup.log().iter().map(|r| r.range_from).collect();
    assert_eq!(from, [None, Some(100_000), Some(200_000)]);
}

#[test]
fn a_later_pull_resumes_and_a_changed_file_starts_over() {
    for (tag_then, tag_now, resumed) in [("\"v1\"", "\"v1\"", true), ("\"v1\"", "\"v2\"", false)] {
        let file = gguf(200_000);
        let expected = file.clone();
        let setup = Setup::new(move |_, r| polite(r, &file, tag_now));
        let folder = setup.dir.path().join("hf/o/r");
        fs::create_dir_all(&folder).unwrap();
        let there = if resumed {
            expected[..50_000].to_vec()
        } else {
            vec![7; 50_000]
        };
        fs::write(folder.join("m.gguf.part"), there).unwrap();
        fs::write(folder.join("m.gguf.part.tag"), tag_then).unwrap();
        assert_eq!(fs::read(setup.pull(SPEC).unwrap()).unwrap(), expected);
        assert_eq!(setup.log()[0].range_from, Some(50_000));
        assert_eq!(setup.left(), ["m.gguf"]);
    }
}

#[test]
fn a_part_that_is_complete_already_needs_no_bytes() {
    let file = gguf(1000);
    let expected = file.clone();
    let setup = Setup::new(|_, _| {
        Answer::new("416 No\r\nContent-Range: bytes */1000\r\nETag: \"v1\"", b"")
    });
    let folder = setup.dir.path().join("hf/o/r");
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("m.gguf.part"), &file).unwrap();
    fs::write(folder.join("m.gguf.part.tag"), "\"v1\"").unwrap();
    assert_eq!(fs::read(setup.pull(SPEC).unwrap()).unwrap(), expected);
}

#[test]
fn a_wrong_range_is_never_appended() {
    let file = gguf(200_000);
    let expected = file.clone();
    let setup = Setup::new(move |number, r| match number {
        0 => polite(r, &file, "\"v1\"").cut_after(100_000),
        1 => Answer::new(
            "206 Partial\r\nETag: \"v1\"\r\nContent-Range: bytes 5-199999/200000",
            &file[5..],
        ),
        _ => polite(r, &file, "\"v1\""),
    });
    assert_eq!(fs::read(setup.pull(SPEC).unwrap()).unwrap(), expected);
    let from: Vec<_> = setup.log().iter().map(|r| r.range_from).collect();
    assert_eq!(from, [None, Some(100_000), None]);

    let setup =
        Setup::new(|_, _| Answer::new("206 Partial\r\nContent-Range: bytes 5-9/10", b"56789"));
    let error = setup.pull(SPEC).unwrap_err();
    assert!(
        matches!(&error, FetchError::Http { why, .. } if why.contains("bytes 5-9/10")),
        "{error}"
    );
}

#[test]
fn a_file_that_keeps_changing_is_given_up() {
    let file = gguf(200_000);
    let setup = Setup::new(move |number, r| {
        polite(r, &file, &format!("\"v{number}\"")).cut_after(50_000 + number)
    });
    let error = setup.pull(SPEC).unwrap_err();
    assert!(
        matches!(&error, FetchError::Http { why, .. } if why.contains("start over")),
        "{error}"
    );
    assert_eq!(setup.log().len(), RESTARTS_MAX as usize + 2);
}

#[test]
fn refusals_have_their_own_errors() {
    for (head, status) in [("401 Unauthorized", 401), ("403 Forbidden", 403)] {
        let error = Setup::new(move |_, _| Answer::new(head, b""))
            .pull(SPEC)
            .unwrap_err();
        assert!(
            matches!(error, FetchError::Denied { status: s, .. } if s == status),
            "{error}"
        );
        assert!(error.hint().unwrap().contains("HF_TOKEN"));
    }
    let error = Setup::new(|_, _| Answer::new("404 Not Found", b""))
        .pull(SPEC)
        .unwrap_err();
    assert!(matches!(error, FetchError::NotFound { .. }), "{error}");
    let error = Setup::new(|_, _| Answer::new("410 Gone", b""))
        .pull(SPEC)
        .unwrap_err();
    assert!(error.to_string().contains("HTTP 410"), "{error}");
}

#[test]
fn a_peer_that_never_delivers_is_given_up() {
    let setup = Setup::new(|_, _| Answer::new("503 Busy", b""));
    let error = setup.pull(SPEC).unwrap_err();
    assert!(
        matches!(
            error,
            FetchError::Cut {
                attempts: ATTEMPTS_WITHOUT_PROGRESS_MAX,
                ..
            }
        ),
        "{error}"
    );
    assert_eq!(setup.log().len(), ATTEMPTS_WITHOUT_PROGRESS_MAX as usize);
}

#[test]
fn nobody_listening_is_being_offline() {
    let port = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let dir = TempDir::new().unwrap();
    let hub = Hub::new(format!("http://127.0.0.1:{port}"), None);
    let error = hub
        .pull(dir.path(), &HubFile::parse(SPEC).unwrap(), &mut ())
        .unwrap_err();
    assert!(matches!(error, FetchError::Offline { .. }), "{error}");
}

#[test]
fn what_is_no_gguf_file_is_refused_and_not_kept() {
    let setup = Setup::new(|_, _| Answer::new("200 OK\r\nETag: \"x\"", b"<html>sign in</html>"));
    let error = setup.pull(SPEC).unwrap_err();
    assert!(matches!(error, FetchError::NotGguf { .. }), "{error}");
    assert!(setup.left().is_empty(), "{:?}", setup.left());
}

#[test]
fn the_announced_digest_is_checked_and_the_token_stays_home() {
    let file = gguf(100_000);
    let mut hasher = Hasher::default();
    hasher.update(&file);
    let right = hasher.hex();
    for announced in [right.clone(), "0".repeat(64)] {
        let body = file.clone();
        let (store, store_log) = serve(move |_, r| polite(r, &body, "\"cdn\""));
        let head = format!("302 Found\r\nX-Linked-ETag: \"{announced}\"\r\nLocation: {store}/blob");
        let setup = Setup::new(move |_, _| Answer::new(&head, b""));
        let pulled = setup.pull(SPEC);
        if announced == right {
            assert_eq!(fs::read(pulled.unwrap()).unwrap(), file);
        } else {
            let error = pulled.unwrap_err();
            assert!(
                matches!(&error, FetchError::Digest { found, .. } if *found == right),
                "{error}"
            );
            assert!(setup.left().is_empty(), "{:?}", setup.left());
        }
        assert!(setup.log()[0].token.is_some());
        let store_log = store_log.lock().unwrap();
        assert_eq!((store_log.len(), store_log[0].token.as_deref()), (1, None));
    }
}

#[test]
fn redirects_end() {
    let setup = Setup::new(|_, _| Answer::new("302 Found\r\nLocation: /again", b""));
    let error = setup.pull(SPEC).unwrap_err();
    assert!(error.to_string().contains("redirects"), "{error}");
}

#[test]
fn the_files_of_a_split_model_come_together() {
    let setup = Setup::new(|_, r| polite(r, &gguf(1000 + r.path.len()), "\"v\""));
    let path = setup.pull("hf:o/r/m-00002-of-00003.gguf").unwrap();
    assert!(
        path.ends_with("hf/o/r/m-00001-of-00003.gguf"),
        "{}",
        path.display()
    );
    let names: Vec<String> = (1..=3).map(|i| format!("m-{i:05}-of-00003.gguf")).collect();
    assert_eq!(setup.left(), names);
}

#[test]
fn names_are_checked() {
    for good in ["hf:o/r/m.gguf", "hf:o/r.v1/folder/m-Q4_K_M.gguf"] {
        assert!(HubFile::parse(good).is_ok(), "{good}");
    }
    for bad in [
        "hf:o/m.gguf",
        "hf:o/r/m.bin",
        "hf:o/r/../m.gguf",
        "hf:../r/m.gguf",
        "hf:o//m.gguf",
        "hf:o/r/.m.gguf",
        "hf:o/r/m.gguf?x.gguf",
        "hf:o/r/a b.gguf",
        "hf:o/r/m-00001-of-99999.gguf",
        "hf:o/r/",
        "hf:",
        "o/r/m.gguf",
        "hf:o/r/a\\b.gguf",
        "hf:o/r/%2e%2e.gguf",
    ] {
        assert!(HubFile::parse(bad).is_err(), "{bad}");
    }
    // Not a name of a split file: index 4 of 3.
    let odd = HubFile::parse("hf:o/r/m-00004-of-00003.gguf").unwrap();
    assert_eq!(odd.all().len(), 1);
}
