//! A server under load: how fast it is with one client and with several, how long a short prompt waits for a long one, and whether every
//! answer is what the same prompt gets alone.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use serde_json::{Value, json};

#[derive(Debug, Args)]
pub struct LoadArgs {
    /// The program under test
    #[arg(long, value_name = "PATH", default_value = "target/release/spillgate")]
    program: PathBuf,
    /// The model to serve
    #[arg(long, value_name = "MODEL", default_value = "smollm2")]
    model: String,
    /// Clients at the same time
    #[arg(long, value_name = "N", default_value_t = 8)]
    clients: usize,
    /// Seconds of mixed load
    #[arg(long, value_name = "SECONDS", default_value_t = 20)]
    seconds: u64,
    /// Tokens of the longest prompt, about
    #[arg(long, value_name = "TOKENS", default_value_t = 4000)]
    prompt_max: usize,
    /// Further flags of the server
    #[arg(last = true)]
    flags: Vec<String>,
}

/// Numbers that look random.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.0 >> 33) as usize % n.max(1)
    }
}

/// A server of our own. Dropped, it is killed.
struct Server {
    child: Child,
    address: String,
    /// How many words of a prompt the model reads as one token: far less than one of a vocabulary of bytes.
    words_a_token: f64,
}

impl Server {
    fn start(args: &LoadArgs, parallel: usize) -> Result<Self> {
        let mut child = Command::new(&args.program)
            .args(["serve", &args.model, "--port", "0", "--temp", "0", "--json"])
            .args(["--parallel", &parallel.to_string(), "--queue", "64"])
            .args(&args.flags)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("cannot start {}", args.program.display()))?;
        let mut line = String::new();
        let stdout = child.stdout.take().context("no stdout")?;
        BufReader::new(stdout).read_line(&mut line)?;
        let ready: Value = serde_json::from_str(&line).context("the server did not start")?;
        let url = ready["url"].as_str().context("no url")?;
        let mut server = Self {
            child,
            address: url.trim_start_matches("http://").to_owned(),
            words_a_token: 1.0,
        };
        let sample = json!({"content": words(0, SAMPLE_WORDS)}).to_string();
        let mut text = String::new();
        let mut answer = server.request("POST", "/tokenize", &sample)?;
        answer.read_to_string(&mut text)?;
        let answer: Value = serde_json::from_str(&text)?;
        let tokens = answer["tokens"].as_array().context("no tokens")?.len();
        server.words_a_token = SAMPLE_WORDS as f64 / tokens as f64;
        Ok(server)
    }

    /// A text of about so many tokens, the same for the same seed.
    fn prompt(&self, seed: usize, tokens: usize) -> String {
        words(seed, (tokens as f64 * self.words_a_token) as usize)
    }

    fn request(&self, method: &str, path: &str, body: &str) -> Result<BufReader<TcpStream>> {
        let mut stream = TcpStream::connect(&self.address)?;
        stream.set_read_timeout(Some(Duration::from_secs(600)))?;
        write!(
            stream,
            "{method} {path} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        )?;
        let mut reader = BufReader::new(stream);
        let mut status = String::new();
        reader.read_line(&mut status)?;
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line)? == 0 || line.trim().is_empty() {
                break;
            }
        }
        if status.split(' ').nth(1) != Some("200") {
            let mut text = String::new();
            reader.read_to_string(&mut text)?;
            bail!("{} {text}", status.trim());
        }
        Ok(reader)
    }

    fn get(&self, path: &str) -> Result<Value> {
        let mut text = String::new();
        self.request("GET", path, "")?.read_to_string(&mut text)?;
        Ok(serde_json::from_str(&text)?)
    }

    /// Streams an answer. `leaves_after`: pieces after which the client goes away.
    fn ask(&self, prompt: &str, n: usize, leaves_after: Option<usize>) -> Result<Heard> {
        let begun = Instant::now();
        let body = json!({"prompt": prompt, "max_tokens": n, "temperature": 0, "stream": true,
            "stream_options": {"include_usage": true}});
        let reader = self.request("POST", "/v1/completions", &body.to_string())?;
        let mut heard = Heard::default();
        let mut pieces = 0;
        for line in reader.lines() {
            let line = line?;
            let Some(data) = line.strip_prefix("data: ") else {
                continue;
            };
            if data == "[DONE]" {
                heard.is_complete = true;
                break;
            }
            let event: Value = serde_json::from_str(data)?;
            ensure!(event.get("error").is_none(), "{event}");
            if let Some(text) = event["choices"][0]["text"].as_str() {
                heard.ttft_s.get_or_insert(begun.elapsed().as_secs_f64());
                heard.text.push_str(text);
            }
            if let Some(tokens) = event["usage"]["completion_tokens"].as_u64() {
                heard.tokens = tokens;
            }
            if let Some(tokens) = event["usage"]["prompt_tokens"].as_u64() {
                heard.prompt_tokens = tokens;
            }
            pieces += 1;
            if leaves_after.is_some_and(|n| pieces >= n) {
                break;
            }
        }
        Ok(heard)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[derive(Debug, Default)]
struct Heard {
    text: String,
    prompt_tokens: u64,
    tokens: u64,
    ttft_s: Option<f64>,
    is_complete: bool,
}

const WORDS: [&str; 16] = [
    "river", "lock", "water", "gate", "the", "a", "rises", "falls", "under", "over", "stone",
    "and", "slowly", "then", "miller", "sees",
];

/// Words of which tokens are counted.
const SAMPLE_WORDS: usize = 1000;

/// A text of so many words, the same for the same seed.
fn words(seed: usize, n: usize) -> String {
    let mut random = Random(seed as u64 + 1);
    let mut text = format!("Story {seed}.");
    for i in 0..n {
        text.push(' ');
        text.push_str(WORDS[random.below(WORDS.len())]);
        if i % 17 == 16 {
            text.push('.');
        }
    }
    text
}

pub fn run(args: &LoadArgs) -> Result<()> {
    let server = Server::start(args, args.clients)?;
    throughput(&server, args.clients)?;
    waiting(&server, args.prompt_max)?;
    let answers = soak(&server, args)?;
    let status = server.get("/v1/status")?;
    println!(
        "afterwards: {} in work, {} waiting, {} sequences kept, KV {} of {} bytes, resident {} bytes",
        status["requests"]["running"],
        status["requests"]["waiting"],
        status["requests"]["kept"],
        status["kv"]["device_bytes"],
        status["kv"]["bytes_max"],
        status["resident_bytes"]
    );
    ensure!(
        status["requests"]["running"] == 0 && status["requests"]["waiting"] == 0,
        "somebody is left"
    );
    drop(server);
    compare(args, &answers)
}

/// Times that one client and several are timed.
const ROUNDS: usize = 3;

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The median, least and most.
fn spread(values: Vec<f64>) -> String {
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    let most = values.iter().copied().fold(0.0, f64::max);
    format!("{:.1} ({least:.1}-{most:.1})", median(values))
}

/// Generated tokens a second, of one client and of several.
fn throughput(server: &Server, clients: usize) -> Result<()> {
    let rate = |clients: usize, first: usize| -> Result<f64> {
        let begun = Instant::now();
        let tokens = thread::scope(|scope| {
            let ask = |i: usize| server.ask(&server.prompt(first + i, 50), 128, None);
            let threads: Vec<_> = (0..clients).map(|i| scope.spawn(move || ask(i))).collect();
            let mut tokens = 0;
            for thread in threads {
                tokens += thread.join().expect("no panic")?.tokens;
            }
            Ok::<u64, anyhow::Error>(tokens)
        })?;
        Ok(tokens as f64 / begun.elapsed().as_secs_f64())
    };
    rate(1, 1000)?;
    // By turns, so that what else the machine does meets both.
    let (mut one, mut several) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        one.push(rate(1, 2000 + 100 * round)?);
        several.push(rate(clients, 3000 + 100 * round)?);
    }
    let ratio = several.iter().zip(&one).map(|(several, one)| several / one);
    let ratio = median(ratio.collect());
    println!(
        "one client {} tok/s, {clients} clients {} tok/s: {ratio:.2} times",
        spread(one),
        spread(several),
    );
    Ok(())
}

/// The time to the first token of a short prompt, alone and behind a long one.
fn waiting(server: &Server, long: usize) -> Result<()> {
    let short = |seed| -> Result<f64> {
        let heard = server.ask(&server.prompt(seed, 30), 4, None)?;
        heard.ttft_s.context("nothing was said")
    };
    let alone = short(4000)?;
    let ask_long = |seed| server.ask(&server.prompt(seed, long), 4, None);
    let long_alone = ask_long(4003)?.ttft_s.context("nothing was said")?;
    let (behind, long) = thread::scope(|scope| {
        let long = scope.spawn(|| ask_long(4001));
        thread::sleep(Duration::from_secs_f64(long_alone / 4.0));
        let behind = short(4002);
        let long = long.join().expect("no panic");
        Ok::<(f64, Heard), anyhow::Error>((behind?, long?))
    })?;
    println!(
        "first token of a short prompt: alone {alone:.3} s, behind one of {} tokens {behind:.3} s; that one's {:.3} s, alone {long_alone:.3} s",
        long.prompt_tokens,
        long.ttft_s.context("nothing was said")?,
    );
    Ok(())
}

/// Main memory that the server has.
fn resident_mib(server: &Server) -> Option<u64> {
    let status = server.get("/v1/status").ok()?;
    Some(status["resident_bytes"].as_u64()? >> 20)
}

/// Prompts and what was answered.
type Answers = BTreeMap<usize, (usize, String)>;

/// Mixed load, with clients that leave.
fn soak(server: &Server, args: &LoadArgs) -> Result<Answers> {
    let end = Instant::now() + Duration::from_secs(args.seconds);
    let answers = Mutex::new(Answers::new());
    let failed = AtomicBool::new(false);
    let left = Mutex::new(0usize);
    let mut resident = Vec::new();
    thread::scope(|scope| {
        for client in 0..args.clients {
            let (answers, failed, left) = (&answers, &failed, &left);
            scope.spawn(move || {
                let mut random = Random(client as u64 + 99);
                let mut turn = 0;
                while Instant::now() < end {
                    // Some prompts are the same, and many begin alike.
                    let seed = if random.below(4) == 0 {
                        random.below(5)
                    } else {
                        10_000 * (client + 1) + turn
                    };
                    let size =
                        50 + random.below(10).pow(2) * args.prompt_max.saturating_sub(50) / 81;
                    let leaves = (random.below(4) == 0).then(|| 1 + random.below(20));
                    turn += 1;
                    let key = seed * 10_000 + size;
                    match server.ask(&server.prompt(seed, size), 24, leaves) {
                        Ok(heard) if heard.is_complete => {
                            let mut answers = answers.lock().expect("no panic");
                            let before = answers.insert(key, (size, heard.text.clone()));
                            if before.is_some_and(|(_, text)| text != heard.text) {
                                eprintln!("prompt {key} got two different answers");
                                failed.store(true, Ordering::Relaxed);
                            }
                        }
                        Ok(_) => *left.lock().expect("no panic") += 1,
                        Err(error) => {
                            eprintln!("client {client}: {error:#}");
                            failed.store(true, Ordering::Relaxed);
                        }
                    }
                }
            });
        }
        while Instant::now() < end {
            thread::sleep(Duration::from_secs(1));
            resident.extend(resident_mib(server));
        }
    });
    ensure!(
        !failed.load(Ordering::Relaxed),
        "errors that no client caused"
    );
    for (i, quarter) in resident
        .chunks(resident.len().div_ceil(4).max(1))
        .enumerate()
    {
        let most = quarter.iter().max().expect("chunks are not empty");
        println!(
            "resident at most, in quarter {} of the time: {most} MiB",
            i + 1
        );
    }
    // Whoever left is noticed before the next token.
    thread::sleep(Duration::from_millis(500));
    let answers = answers.into_inner().expect("no panic");
    println!(
        "{} s, {} clients: {} different prompts answered, {} clients left early",
        args.seconds,
        args.clients,
        answers.len(),
        left.into_inner().expect("no panic")
    );
    Ok(answers)
}

/// Asks all of the prompts again, one at a time, of a server that has answered nothing yet. It has room for as many as the other one: with
/// less to hold it may choose another form of the cache.
fn compare(args: &LoadArgs, answers: &Answers) -> Result<()> {
    let server = Server::start(args, args.clients)?;
    for (key, (size, answer)) in answers {
        let alone = server.ask(&server.prompt((key - size) / 10_000, *size), 24, None)?;
        ensure!(
            alone.text == *answer,
            "prompt {key}: alone {:?}, side by side {answer:?}",
            alone.text
        );
    }
    let compared = answers.len();
    println!("{compared} answers compared with those of the same prompts alone: equal to the byte");
    Ok(())
}
