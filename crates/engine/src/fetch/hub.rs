//! `hf:OWNER/REPO/FILE.gguf`: files of a model hub over HTTPS, resumed by range.

mod http;

use std::env;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::thread;

use http::{Body, Client, Start};

use super::limits::{
    ATTEMPTS_WITHOUT_PROGRESS_MAX, CHUNK_BYTES, RESTARTS_MAX, RETRY_PAUSE, SPLIT_FILES_MAX,
};
use super::lock::Lock;
use super::sha256::{Hasher, hash_exactly};
use super::{FetchError, Progress, check_space, publish, with_suffix};

/// A file of a repository on the hub.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubFile {
    owner: String,
    repo: String,
    /// Path inside the repository, with `/`.
    file: String,
}

impl HubFile {
    /// Parses `hf:OWNER/REPO/FILE.gguf`; FILE may lie in folders.
    pub fn parse(spec: &str) -> Result<Self, FetchError> {
        let bad = |why| FetchError::HubName {
            spec: spec.to_owned(),
            why,
        };
        let rest = spec
            .strip_prefix("hf:")
            .ok_or_else(|| bad("it does not begin with hf:"))?;
        let mut pieces = rest.splitn(3, '/');
        let (Some(owner), Some(repo), Some(file)) = (pieces.next(), pieces.next(), pieces.next())
        else {
            return Err(bad("owner, repository and file are separated by '/'"));
        };
        for piece in rest.split('/') {
            // The names become folders of the cache and a path of the address: nothing that either could misread.
            let plain = piece
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-' | b'+'));
            if piece.is_empty() || piece.starts_with('.') || !plain {
                return Err(bad(
                    "names are made of letters, digits and . _ - + and do not begin with a dot",
                ));
            }
        }
        if !file.ends_with(".gguf") {
            return Err(bad("the file's name does not end in .gguf"));
        }
        let parsed = Self {
            owner: owner.to_owned(),
            repo: repo.to_owned(),
            file: file.to_owned(),
        };
        match parsed.split() {
            Some((_, _, count)) if count > SPLIT_FILES_MAX => Err(bad("too many split files")),
            // A split model is named by any of its files; its path is that of the first.
            Some((stem, _, count)) => Ok(parsed.with_file(split_name(stem, 1, count))),
            None => Ok(parsed),
        }
    }

    /// Where the file lies below the cache folder.
    pub fn relative_path(&self) -> PathBuf {
        let mut path: PathBuf = ["hf", &self.owner, &self.repo].iter().collect();
        path.extend(self.file.split('/'));
        path
    }

    /// This file, or all files of the split model that it belongs to.
    fn all(&self) -> Vec<Self> {
        match self.split() {
            Some((stem, _, count)) => (1..=count)
                .map(|i| self.with_file(split_name(stem, i, count)))
                .collect(),
            None => vec![self.clone()],
        }
    }

    fn with_file(&self, file: String) -> Self {
        Self {
            file,
            ..self.clone()
        }
    }

    /// `STEM-00002-of-00005.gguf` as stem, 2 and 5.
    fn split(&self) -> Option<(&str, u32, u32)> {
        let rest = self.file.strip_suffix(".gguf")?;
        let (rest, count) = rest.rsplit_once("-of-")?;
        let (stem, index) = rest.rsplit_once('-')?;
        let number = |s: &str| {
            (s.len() == 5 && s.bytes().all(|b| b.is_ascii_digit()))
                .then(|| s.parse::<u32>().ok())
                .flatten()
        };
        let (index, count) = (number(index)?, number(count)?);
        (1..=count).contains(&index).then_some((stem, index, count))
    }
}

fn split_name(stem: &str, index: u32, count: u32) -> String {
    format!("{stem}-{index:05}-of-{count:05}.gguf")
}

/// A model hub, and the token that opens its private repositories.
#[derive(Clone)]
pub struct Hub {
    endpoint: String,
    token: Option<String>,
}

// Not derived: a token does not belong into a log.
impl std::fmt::Debug for Hub {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let token = if self.token.is_some() { "set" } else { "none" };
        f.debug_struct("Hub")
            .field("endpoint", &self.endpoint)
            .field("token", &token)
            .finish()
    }
}

impl Hub {
    /// `HF_ENDPOINT` (by default the public hub) and `HF_TOKEN`.
    pub fn from_env() -> Self {
        let set = |name| {
            env::var(name)
                .ok()
                .map(|v: String| v.trim().to_owned())
                .filter(|v| !v.is_empty())
        };
        Self::new(
            set("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".to_owned()),
            set("HF_TOKEN"),
        )
    }

    /// The hub at that address.
    pub fn new(endpoint: String, token: Option<String>) -> Self {
        Self {
            endpoint: endpoint.trim_end_matches('/').to_owned(),
            token,
        }
    }

    /// Fetches what is missing of a file, and of the files it is split with, below `dir`. Returns the first one's path.
    pub(super) fn pull(
        &self,
        dir: &Path,
        file: &HubFile,
        progress: &mut dyn Progress,
    ) -> Result<PathBuf, FetchError> {
        let client = Client::new(&self.endpoint, self.token.as_deref());
        for file in file.all() {
            let path = dir.join(file.relative_path());
            if path.is_file() {
                continue;
            }
            let _lock = Lock::acquire(&path, progress)?;
            if !path.is_file() {
                let HubFile { owner, repo, file } = &file;
                let url = format!("{}/{owner}/{repo}/resolve/main/{file}", self.endpoint);
                Download::new(&client, url, path)?.run(progress)?;
            }
        }
        Ok(dir.join(file.relative_path()))
    }
}

/// One file on its way: `FILE.part` holds what came, `FILE.part.tag` the entity tag that it belongs to.
struct Download<'a> {
    client: &'a Client,
    url: String,
    path: PathBuf,
    part_path: PathBuf,
    tag_path: PathBuf,
    part: File,
    done_bytes: u64,
    restarts: u32,
}

impl<'a> Download<'a> {
    fn new(client: &'a Client, url: String, path: PathBuf) -> Result<Self, FetchError> {
        let part_path = with_suffix(&path, ".part");
        let tag_path = with_suffix(&part_path, ".tag");
        let part = File::options()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(&part_path)
            .map_err(|e| FetchError::io("open", &part_path, e))?;
        let done_bytes = part
            .metadata()
            .map_err(|e| FetchError::io("measure", &part_path, e))?
            .len();
        Ok(Self {
            client,
            url,
            path,
            part_path,
            tag_path,
            part,
            done_bytes,
            restarts: 0,
        })
    }

    fn run(mut self, progress: &mut dyn Progress) -> Result<(), FetchError> {
        let mut failed_in_a_row = 0;
        let mut begun = false;
        loop {
            if progress.interrupted() {
                return Err(FetchError::Interrupted);
            }
            let before = self.done_bytes;
            match self.attempt(&mut begun, progress) {
                Ok(expected_sha256) => return self.complete(expected_sha256, progress),
                Err(Failure::Fatal(e)) => return Err(e),
                Err(Failure::NoResume(_)) if self.done_bytes > 0 => {
                    progress.note("the server does not continue the file; starting over");
                    self.cut_back(0)?;
                }
                Err(Failure::NoResume(why)) => return Err(FetchError::Http { url: self.url, why }),
                Err(Failure::Passing {
                    detail,
                    never_reached,
                }) => {
                    failed_in_a_row = if self.done_bytes > before {
                        0
                    } else {
                        failed_in_a_row + 1
                    };
                    if failed_in_a_row >= ATTEMPTS_WITHOUT_PROGRESS_MAX {
                        let (url, at) = (self.url, self.done_bytes);
                        return Err(if never_reached {
                            FetchError::Offline { what: url, detail }
                        } else {
                            FetchError::Cut {
                                url,
                                attempts: failed_in_a_row,
                                at,
                                detail,
                            }
                        });
                    }
                    thread::sleep(RETRY_PAUSE * failed_in_a_row);
                }
            }
        }
    }

    /// One request: continues at `done_bytes` where the server agrees that it is still the same file.
    /// Returns the SHA-256 that the hub announces for the file, if it does.
    fn attempt(
        &mut self,
        begun: &mut bool,
        progress: &mut dyn Progress,
    ) -> Result<Option<String>, Failure> {
        // A prefix without a strong tag cannot be shown to belong to the file: it is fetched again.
        let tag = fs::read_to_string(&self.tag_path)
            .ok()
            .filter(|_| self.done_bytes > 0);
        let resume = tag.as_deref().map(|tag| (self.done_bytes, tag));
        let Start {
            start_bytes,
            total_bytes,
            tag,
            sha256,
            mut body,
        } = self.client.get(&self.url, resume)?;
        if start_bytes != self.done_bytes {
            if resume.is_some() {
                progress.note("the file has changed since the last pull; starting over");
            }
            self.cut_back(start_bytes)?;
        }
        if start_bytes == 0 {
            match &tag {
                Some(tag) => fs::write(&self.tag_path, tag)
                    .map_err(|e| FetchError::io("write", &self.tag_path, e))?,
                None => remove_if_there(&self.tag_path)?,
            }
        }
        let dir = self
            .path
            .parent()
            .expect("a file in the cache has a folder");
        check_space(dir, total_bytes - start_bytes)?;
        if !*begun {
            let name = self.path.file_name().unwrap_or_default().to_string_lossy();
            progress.begin(&name, start_bytes, total_bytes);
            *begun = true;
        }
        self.receive(&mut body, total_bytes, progress)?;
        Ok(sha256)
    }

    fn receive(
        &mut self,
        body: &mut Body,
        total_bytes: u64,
        progress: &mut dyn Progress,
    ) -> Result<(), Failure> {
        let io = |e| FetchError::io("write", &self.part_path, e);
        self.part
            .seek(SeekFrom::Start(self.done_bytes))
            .map_err(io)?;
        let mut buffer = vec![0; CHUNK_BYTES];
        while self.done_bytes < total_bytes {
            if progress.interrupted() {
                return Err(FetchError::Interrupted.into());
            }
            let got = body.read(&mut buffer).map_err(|e| Failure::Passing {
                detail: e.to_string(),
                never_reached: false,
            })?;
            if got == 0 {
                let detail = format!(
                    "the answer ended at byte {} of {total_bytes}",
                    self.done_bytes
                );
                return Err(Failure::Passing {
                    detail,
                    never_reached: false,
                });
            }
            if got as u64 > total_bytes - self.done_bytes {
                return Err(FetchError::Http {
                    url: self.url.clone(),
                    why: format!("the answer is longer than the announced {total_bytes} bytes"),
                }
                .into());
            }
            self.part.write_all(&buffer[..got]).map_err(io)?;
            self.done_bytes += got as u64;
            progress.advance(self.done_bytes);
        }
        Ok(())
    }

    /// Forgets what came after that byte. A file that keeps changing under us is given up.
    fn cut_back(&mut self, bytes: u64) -> Result<(), FetchError> {
        self.restarts += 1;
        if self.restarts > RESTARTS_MAX {
            let why = format!("the download had to start over {RESTARTS_MAX} times");
            return Err(FetchError::Http {
                url: self.url.clone(),
                why,
            });
        }
        self.part
            .set_len(bytes)
            .map_err(|e| FetchError::io("truncate", &self.part_path, e))?;
        self.done_bytes = bytes;
        Ok(())
    }

    fn complete(
        mut self,
        sha256: Option<String>,
        progress: &mut dyn Progress,
    ) -> Result<(), FetchError> {
        let checked = self.check(sha256);
        if checked.is_err() {
            // What is wrong at the end was wrong from the start: nothing of it is worth keeping.
            remove_if_there(&self.tag_path)?;
            remove_if_there(&self.part_path)?;
        }
        checked?;
        publish(&self.part_path, &self.part, &self.path)?;
        remove_if_there(&self.tag_path)?;
        progress.finish();
        Ok(())
    }

    fn check(&mut self, sha256: Option<String>) -> Result<(), FetchError> {
        let io = |e| FetchError::io("read", &self.part_path, e);
        let mut magic = [0; 4];
        self.part.seek(SeekFrom::Start(0)).map_err(io)?;
        let magic_bytes = self.done_bytes.min(4) as usize;
        self.part
            .read_exact(&mut magic[..magic_bytes])
            .map_err(io)?;
        if &magic != b"GGUF" {
            return Err(FetchError::NotGguf {
                what: self.url.clone(),
            });
        }
        let Some(expected) = sha256 else {
            return Ok(());
        };
        self.part.seek(SeekFrom::Start(0)).map_err(io)?;
        let mut hasher = Hasher::default();
        hash_exactly(&mut self.part, self.done_bytes, &mut [&mut hasher]).map_err(io)?;
        let found = hasher.hex();
        if found != expected {
            return Err(FetchError::Digest {
                what: self.url.clone(),
                found,
                expected,
            });
        }
        Ok(())
    }
}

/// Why an attempt failed: for good, or in a way that another attempt may mend.
enum Failure {
    Fatal(FetchError),
    Passing {
        detail: String,
        never_reached: bool,
    },
    /// The server cannot continue at the byte asked for; it may still send the file from the start.
    NoResume(String),
}

impl From<FetchError> for Failure {
    fn from(e: FetchError) -> Self {
        Self::Fatal(e)
    }
}

fn remove_if_there(path: &Path) -> Result<(), FetchError> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(FetchError::io("remove", path, e))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
