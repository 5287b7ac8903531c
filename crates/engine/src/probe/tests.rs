//! The structure of profiles, their keys and the cache. Timings are only asked to be possible ones.

use super::*;
use place::profile::Figure;
use std::collections::HashMap;
use std::fs;
use subject::{Fork, Heads};

/// A model that is measured in a moment.
fn tiny() -> Subject {
    let mut subject = Subject::ordinary();
    subject.forks = vec![Fork {
        ty: TensorType::Q4_0,
        k: 64,
        rows: vec![32, 16],
        passes: quant::act::Passes::One,
    }];
    subject.heads = Some(Heads {
        heads: 2,
        heads_kv: 1,
        head_k: 32,
        head_v: 32,
    });
    subject.layers = 1;
    subject.active_bytes = 1 << 20;
    subject
}

fn settings(dir: &std::path::Path) -> Settings {
    Settings {
        threads: Some(2),
        isa: None,
        ubatch: 16,
        // Each in a moment, and time for all.
        time_max: Duration::from_secs(60),
        figure_max: Duration::from_millis(8),
        dir: Some(dir.to_owned()),
        ..Settings::default()
    }
}

#[derive(Default)]
struct Log {
    steps: Vec<(usize, usize)>,
    notes: Vec<String>,
    finished: usize,
    steps_max: Option<usize>,
}

impl Progress for Log {
    fn step(&mut self, _what: &str, done: usize, total: usize) {
        self.steps.push((done, total));
    }
    fn finish(&mut self) {
        self.finished += 1;
    }
    fn note(&mut self, text: &str) {
        self.notes.push(text.to_owned());
    }
    fn interrupted(&self) -> bool {
        self.steps_max.is_some_and(|max| self.steps.len() >= max)
    }
}

#[test]
fn a_profile_is_measured_once_and_then_cached() {
    let dir = tempfile::tempdir().unwrap();
    let (subject, settings) = (tiny(), settings(dir.path()));
    let mut log = Log::default();
    assert_eq!(cached(&subject, &settings, &mut log), None);
    let first = profile(&subject, &settings, Reuse::Cached, &mut log).unwrap();
    first.validate().unwrap();
    assert_eq!(first.source, profile::Source::Measured);
    assert_eq!(
        (first.host.products.len(), first.host.attention.len()),
        (1, 4)
    );
    assert_eq!(first.host.products[0].format, "Q4_0");
    assert_eq!(first.host.isa, Isa::best().name());
    assert_eq!(
        (first.device.is_none(), first.host.disk_read_gb_s),
        (true, None)
    );
    for (path, figure, _) in first.figures() {
        let may_be_none = path.ends_with("engage_us");
        assert!(figure.value > 0.0 || may_be_none, "{path}: {figure:?}");
        assert!(
            figure.value.is_finite() && figure.spread.is_finite(),
            "{path}"
        );
    }
    // Every step was told, with the right total.
    let total = log.steps[0].1;
    let expected: Vec<_> = (0..total).map(|done| (done, total)).collect();
    assert_eq!((log.steps, log.finished), (expected, 1));
    // Other work on this machine may disturb figures; nothing else is said.
    let disturbed = usize::from(!first.disturbed.is_empty());
    assert_eq!(
        (log.notes.len(), first.guessed.len()),
        (disturbed, 0),
        "{:?}",
        log.notes
    );

    let mut log = Log::default();
    let mut second = profile(&subject, &settings, Reuse::Cached, &mut log).unwrap();
    assert!(log.steps.is_empty(), "nothing is measured again");
    assert_eq!(
        cached(&subject, &settings, &mut log).unwrap().key,
        first.key
    );
    second.host.memory_available_bytes = first.host.memory_available_bytes;
    assert_eq!(second, first);

    let third = profile(&subject, &settings, Reuse::Anew, &mut log).unwrap();
    assert_eq!(log.steps.len(), total, "all is measured again");
    let changed = log
        .notes
        .iter()
        .filter(|n| n.contains("differ from before"));
    assert_eq!(changed.count(), 1, "what changed is said: {:?}", log.notes);
    assert_eq!(third.key, first.key);
    // A figure is the old one, or differs from it by more than noise, unless the old one was disturbed. What noise hid from the first is
    // new in the third.
    let before: HashMap<String, Figure> = first
        .figures()
        .into_iter()
        .map(|(path, figure, _)| (path, figure))
        .collect();
    for (path, new, _) in &third.figures() {
        let Some(&old) = before.get(path) else {
            assert_eq!(path, "host.stage_gb_s");
            continue;
        };
        let replaced = first.disturbed.contains(path);
        assert!(
            *new == old || old.differs(new) || replaced,
            "{path}: {old:?} {new:?}"
        );
    }
}

#[test]
fn a_damaged_cache_is_measured_anew_with_a_warning() {
    let dir = tempfile::tempdir().unwrap();
    let (subject, settings) = (tiny(), settings(dir.path()));
    let path = cache::path(dir.path(), &settings.key(&subject));
    fs::write(&path, "{\"version\":").unwrap();
    let mut log = Log::default();
    let measured = profile(&subject, &settings, Reuse::Cached, &mut log).unwrap();
    assert!(log.notes[0].contains("cannot be used"), "{:?}", log.notes);
    assert!(!log.steps.is_empty());
    let text = fs::read_to_string(&path).unwrap();
    assert_eq!(Profile::from_json(&text).unwrap().key, measured.key);
}

#[test]
fn what_cannot_be_kept_is_measured_all_the_same() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let (subject, settings) = (tiny(), settings(&file.path().join("below")));
    let mut log = Log::default();
    let measured = profile(&subject, &settings, Reuse::Cached, &mut log).unwrap();
    assert_eq!(measured.source, profile::Source::Measured);
    let told = log.notes.iter().filter(|note| note.contains("is not kept"));
    assert_eq!(told.count(), 1, "{:?}", log.notes);
}

#[test]
fn what_there_is_no_time_for_is_a_labelled_guess_and_replaces_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let subject = tiny();
    let measured = profile(&subject, &settings(dir.path()), Reuse::Cached, &mut ()).unwrap();
    let hurried = Settings {
        time_max: Duration::ZERO,
        ..settings(dir.path())
    };
    let mut log = Log::default();
    let kept = profile(&subject, &hurried, Reuse::Anew, &mut log).unwrap();
    assert_eq!(kept.figures(), measured.figures());
    assert_eq!(
        (kept.guessed.len(), &kept.disturbed),
        (0, &measured.disturbed)
    );
    // Where nothing was measured before there are guesses, from the default profile, under this machine's names.
    let other = tempfile::tempdir().unwrap();
    let hurried = Settings {
        dir: Some(other.path().to_owned()),
        ..hurried
    };
    let mut log = Log::default();
    let guessed = profile(&subject, &hurried, Reuse::Cached, &mut log).unwrap();
    guessed.validate().unwrap();
    let default = place::profile::default_profile();
    assert_eq!(guessed.host.fork_join_us, default.host.fork_join_us);
    let [product] = &guessed.host.products[..] else {
        panic!("{:?}", guessed.host.products)
    };
    assert_eq!(
        (product.format.as_str(), product.isa.as_str()),
        ("Q4_0", Isa::best().name())
    );
    let all = guessed.figures();
    // Of the two depths of attention each gives its figure its doubt.
    let paths: Vec<&str> = all.iter().map(|(path, ..)| path.as_str()).collect();
    for path in &guessed.guessed {
        assert!(paths.contains(&path.as_str()), "{path}: {paths:?}");
    }
    assert_eq!(guessed.guessed.len(), all.len(), "{:?}", guessed.guessed);
    assert!(
        log.notes
            .iter()
            .any(|n| n.contains("not measured for lack of time")),
        "{:?}",
        log.notes
    );
    let again = cached(&subject, &hurried, &mut ()).unwrap();
    assert_eq!(again.guessed, guessed.guessed);
}

#[test]
fn an_interruption_ends_it_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (subject, settings) = (tiny(), settings(dir.path()));
    for steps_max in [1, 4, 9] {
        let mut log = Log {
            steps_max: Some(steps_max),
            ..Log::default()
        };
        let ended = profile(&subject, &settings, Reuse::Cached, &mut log);
        assert!(matches!(ended, Err(Error::Interrupted)));
        assert_eq!(log.steps.len(), steps_max);
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn the_key_has_all_that_shapes_a_measurement() {
    let dir = tempfile::tempdir().unwrap();
    let (subject, settings) = (tiny(), settings(dir.path()));
    let key = settings.key(&subject);
    assert_eq!(key, settings.key(&subject));
    assert!(key.device.is_empty() && key.threads == 2 && key.cores > 0);
    let with = |change: &dyn Fn(&mut Settings)| {
        let mut settings = settings.clone();
        change(&mut settings);
        settings.key(&subject)
    };
    let of = |change: &dyn Fn(&mut Subject)| {
        let mut subject = subject.clone();
        change(&mut subject);
        settings.key(&subject)
    };
    let others = [
        with(&|s| s.threads = Some(3)),
        with(&|s| s.isa = Some(Isa::Scalar)),
        with(&|s| s.pinning = Pinning::Pinned),
        with(&|s| s.ubatch = 17),
        with(&|s| s.formats = Formats::All),
        of(&|s| s.heads = None),
        of(&|s| s.heads.as_mut().unwrap().heads = 4),
        of(&|s| s.heads.as_mut().unwrap().head_v = 64),
        of(&|s| s.layers = 2),
        of(&|s| s.active_bytes *= 2),
        of(&|s| s.forks[0].ty = TensorType::Q8_0),
    ];
    for (i, other) in others.iter().enumerate() {
        assert_ne!(*other, key, "change {i}");
    }
}

#[test]
fn a_profile_of_all_formats_serves_a_model() {
    let dir = tempfile::tempdir().unwrap();
    let (subject, settings) = (tiny(), settings(dir.path()));
    let all = Settings {
        formats: Formats::All,
        ..settings.clone()
    };
    let mut stored = place::profile::default_profile();
    (stored.source, stored.key) = (profile::Source::Measured, all.key(&subject));
    cache::store(dir.path(), &stored).unwrap();
    let found = cached(&subject, &settings, &mut ()).unwrap();
    assert_eq!(found.key, stored.key);
    let formats = all.formats(&subject).len();
    assert_eq!(formats, quant::formats::supported().len());
    assert!(all.isas().iter().all(|isa| *isa != Isa::Scalar) || all.isas().len() == 1);
}

#[test]
fn impossible_settings_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    for ubatch in [0, UBATCH_MAX + 1] {
        let settings = Settings {
            ubatch,
            ..settings(dir.path())
        };
        let refused = profile(&tiny(), &settings, Reuse::Cached, &mut ());
        assert!(matches!(refused, Err(Error::Ubatch(n)) if n == ubatch));
    }
}

#[test]
fn figures_keep_five_digits_and_survive_text() {
    let mut profile = place::profile::default_profile();
    let mut x = 1e-3;
    profile.visit_mut(&mut |_, figure, _| {
        x *= 1.234_567_890_123;
        *figure = rounded(Figure {
            value: x % 0.9 + 0.01,
            spread: x / 7.0,
        });
    });
    assert_eq!(Profile::from_json(&profile.to_json()).unwrap(), profile);
    let figure = rounded(Figure {
        value: 12_345.678,
        spread: 0.0,
    });
    assert_eq!((figure.value, figure.spread), (12_346.0, 0.0));
}
