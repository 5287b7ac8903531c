//! A small client. It speaks HTTP/1.0, so that a body ends where the connection does.

#![allow(dead_code, reason = "each test binary uses some of the helpers")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use serde_json::Value;

/// Longer than anything takes; a server that does not answer fails a test instead of holding it.
const PATIENCE: Duration = Duration::from_secs(60);

/// Where to ask, and with which headers.
#[derive(Clone)]
pub struct Client {
    pub address: SocketAddr,
    pub headers: Vec<(String, String)>,
}

/// What came back.
#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    /// Lines of the head after the first, in lower case.
    pub head: Vec<String>,
    pub body: Vec<u8>,
}

impl Reply {
    pub fn text(&self) -> String {
        String::from_utf8(self.body.clone()).expect("bodies are UTF-8")
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|e| panic!("{e}: {:?}", String::from_utf8_lossy(&self.body)))
    }

    /// The body of a good answer.
    pub fn ok(self) -> Value {
        assert_eq!(self.status, 200, "{}", self.text());
        self.json()
    }

    /// Checks that it is an error of this status in the API's form; what it says.
    pub fn error(&self, status: u16) -> Value {
        assert_eq!(self.status, status, "{}", self.text());
        let error = self.json()["error"].clone();
        assert!(!error["message"].as_str().unwrap().is_empty(), "{error}");
        assert!(error["type"].is_string(), "{error}");
        for key in ["param", "code"] {
            let value = error.get(key).expect("the key is there");
            assert!(value.is_null() || value.is_string(), "{error}");
        }
        error
    }
}

/// A streamed answer as it comes. Dropped, it closes the connection.
pub struct Stream {
    reader: BufReader<TcpStream>,
    pub status: u16,
}

impl Stream {
    /// The data of the next event.
    pub fn next(&mut self) -> Option<String> {
        let mut line = String::new();
        loop {
            line.clear();
            if self.reader.read_line(&mut line).expect("a line in time") == 0 {
                return None;
            }
            if let Some(data) = line.strip_prefix("data: ") {
                return Some(data.trim_end().to_owned());
            }
        }
    }

    /// All data until the end.
    pub fn rest(mut self) -> Vec<String> {
        std::iter::from_fn(|| self.next()).collect()
    }
}

/// The chunks of a stream, which is complete, and its text.
pub fn chunks(mut data: Vec<String>) -> (Vec<Value>, String) {
    assert_eq!(data.pop().as_deref(), Some("[DONE]"), "{data:?}");
    let chunks: Vec<Value> = data
        .iter()
        .map(|data| serde_json::from_str(data).expect("chunks are JSON"))
        .collect();
    let texts = chunks.iter().filter_map(|chunk| {
        let choice = &chunk["choices"][0];
        choice["text"]
            .as_str()
            .or(choice["delta"]["content"].as_str())
    });
    let text = texts.collect();
    (chunks, text)
}

impl Client {
    pub fn new(address: SocketAddr) -> Self {
        Self {
            address,
            headers: Vec::new(),
        }
    }

    /// The same with one more header.
    pub fn with(&self, name: &str, value: &str) -> Self {
        let mut client = self.clone();
        client.headers.push((name.to_owned(), value.to_owned()));
        client
    }

    fn send(
        &self,
        method: &str,
        path: &str,
        body: &[u8],
    ) -> (u16, Vec<String>, BufReader<TcpStream>) {
        let mut stream = TcpStream::connect(self.address).expect("the server listens");
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut head = format!(
            "{method} {path} HTTP/1.0\r\nContent-Length: {}\r\n",
            body.len()
        );
        for (name, value) in &self.headers {
            head += &format!("{name}: {value}\r\n");
        }
        head += "\r\n";
        stream.write_all(head.as_bytes()).unwrap();
        // A server that refuses early does not read all of it.
        let _ = stream.write_all(body);
        let mut reader = BufReader::new(stream);
        let mut lines = Vec::new();
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).expect("a head in time");
            let line = line.trim_end();
            if line.is_empty() {
                break;
            }
            lines.push(line.to_lowercase());
        }
        let status = lines.first().expect("a status").split(' ').nth(1);
        let status = status.expect("a status").parse().unwrap();
        lines.remove(0);
        (status, lines, reader)
    }

    pub fn raw(&self, method: &str, path: &str, body: &[u8]) -> Reply {
        let (status, head, mut reader) = self.send(method, path, body);
        let mut body = Vec::new();
        reader.read_to_end(&mut body).expect("a body in time");
        Reply { status, head, body }
    }

    pub fn get(&self, path: &str) -> Reply {
        self.raw("GET", path, b"")
    }

    pub fn post(&self, path: &str, body: &Value) -> Reply {
        self.with("Content-Type", "application/json")
            .raw("POST", path, body.to_string().as_bytes())
    }

    /// A request with `stream`.
    pub fn stream(&self, path: &str, body: &Value) -> Stream {
        let mut body = body.clone();
        body["stream"] = true.into();
        let (status, _, reader) = self.with("Content-Type", "application/json").send(
            "POST",
            path,
            body.to_string().as_bytes(),
        );
        Stream { reader, status }
    }

    /// A value of `/metrics`.
    pub fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").text();
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        let value = line.unwrap_or_else(|| panic!("no {name} in {text}"));
        value.trim().parse().unwrap()
    }

    /// Waits until a value of `/metrics` is this.
    pub fn until(&self, name: &str, value: f64) {
        for _ in 0..2000 {
            if self.metric(name) == value {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("{name} is {}, expected {value}", self.metric(name));
    }
}
