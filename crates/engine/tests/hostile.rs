//! Hostile model files: each is an error that names the place, costs little memory, and never panics.

mod common;
#[path = "common/damaged/mod.rs"]
mod damaged;

use std::fs::{self, File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use damaged::{Damaged, NoticedBy, Sketch};
use engine::generate::memory;
use engine::model::{LoadOptions, Model};
use engine::session::{Session, SessionOptions, Wanted};
use engine::template::{ChatTemplate, TemplateError};
use engine::tokenizer::{EncodeOptions, Tokenizer};
use gguf::{GgufFile, Header, MapMode};
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// Memory that a damaged file may take. 200 MB are promised; this is less than the weights of the smallest real model, so
/// it shows that none are read before the file is known to be good.
const PEAK_BYTES_MAX: usize = 64 << 20;

/// How far loading went.
struct Loaded {
    model: Model,
    tokenizer: Tokenizer,
}

/// Loads a file as the program does.
fn load(path: &Path, map: MapMode) -> Result<Loaded, String> {
    let options = LoadOptions {
        threads: Some(1),
        map,
        ..LoadOptions::default()
    };
    let file = GgufFile::open(path, map).map_err(|e| e.to_string())?;
    let tokenizer = Tokenizer::from_gguf(file.metadata()).map_err(|e| e.to_string())?;
    let model = Model::load(path, &options, &mut |_| {}).map_err(|e| e.to_string())?;
    Ok(Loaded { model, tokenizer })
}

/// Makes a session and reads two tokens: whatever loads has to run.
fn step(model: &Model) -> Result<Vec<f32>, String> {
    let mut options = SessionOptions::for_model(model.config());
    options.n_ctx = 8;
    let mut session = Session::new(model, &options).map_err(|e| e.to_string())?;
    let last = model.config().n_vocab as u32 - 1;
    session
        .prefill(&[0, last], Wanted::Last)
        .map_err(|e| e.to_string())?;
    Ok(session.logits().to_vec())
}

/// The message about a file, as far as the one goes who has to notice the damage.
fn message(file: &Damaged, map: MapMode) -> Result<(), String> {
    let loaded = load(&file.path, map)?;
    match file.noticed_by {
        NoticedBy::Load => Ok(()),
        NoticedBy::Session => step(&loaded.model).map(|_| ()),
        NoticedBy::Chat => {
            let metadata = GgufFile::open(&file.path, map).map_err(|e| e.to_string())?;
            match ChatTemplate::from_gguf(metadata.metadata(), &loaded.tokenizer) {
                Err(TemplateError::Missing) | Ok(_) => Ok(()),
                Err(error) => Err(error.to_string()),
            }
        }
    }
}

/// What is wrong with the answer to a damaged file.
fn fault(file: &Damaged, map: MapMode) -> Option<String> {
    let before = ALLOCATOR.current_usage();
    ALLOCATOR.reset_peak_usage();
    let answer = catch_unwind(AssertUnwindSafe(|| message(file, map)));
    let peak = ALLOCATOR.peak_usage().saturating_sub(before);
    if peak > PEAK_BYTES_MAX {
        return Some(format!("{peak} bytes were allocated"));
    }
    match answer {
        Err(_) => Some("a panic".to_owned()),
        Ok(Ok(())) => Some("it was taken".to_owned()),
        Ok(Err(text)) => {
            let missing: Vec<_> = file
                .says
                .iter()
                .filter(|say| !text.contains(*say))
                .collect();
            (!missing.is_empty()).then(|| format!("{text:?} lacks {missing:?}"))
        }
    }
}

fn check(files: &[Damaged], at_least: usize) {
    assert!(files.len() >= at_least, "{} files", files.len());
    let mut faults = Vec::new();
    for file in files {
        for map in [MapMode::Mmap, MapMode::Read] {
            if let Some(fault) = fault(file, map) {
                faults.push(format!("{} ({map:?}): {fault}", file.name));
            }
        }
    }
    println!(
        "{} damaged files, peak {:?}",
        files.len(),
        memory::peak_bytes()
    );
    assert!(
        faults.is_empty(),
        "{}:\n{}",
        faults.len(),
        faults.join("\n")
    );
    // The system's count has what is mapped, too. It covers the other tests of this program, which take less.
    match memory::peak_bytes() {
        Some(peak) => assert!(peak <= PEAK_BYTES_MAX as u64, "{peak} bytes were resident"),
        None => common::skipped("peak memory of damaged files", "the system does not tell"),
    }
}

#[test]
fn damaged_made_up_models_are_refused() {
    let dir = tempfile::tempdir().expect("a folder");
    check(&damaged::made_up(dir.path()), 120);
}

#[test]
fn damaged_real_models_are_refused() {
    let dir = tempfile::tempdir().expect("a folder");
    let model = common::model_path("smollm2");
    check(&damaged::of_model(&model, dir.path()), 15);
}

#[test]
fn the_undamaged_model_runs() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("sound.gguf");
    Sketch::sound().write(&path);
    let loaded = load(&path, MapMode::Mmap).unwrap_or_else(|e| panic!("{e}"));
    let text = "abad zy\u{e9}";
    let ids = loaded.tokenizer.encode(text, EncodeOptions::default());
    let ids = ids.unwrap_or_else(|e| panic!("{e}"));
    assert!(ids.len() < text.len(), "merges were used: {ids:?}");
    let logits = step(&loaded.model).unwrap_or_else(|e| panic!("{e}"));
    assert!(logits.iter().all(|x| x.is_finite()));
    let spread = logits
        .iter()
        .fold(0f32, |m, x| m.max((x - logits[0]).abs()));
    assert!(spread > 1e-3, "all logits are alike: {spread}");
    let again = load(&path, MapMode::Read).unwrap_or_else(|e| panic!("{e}"));
    let again = step(&again.model).unwrap_or_else(|e| panic!("{e}"));
    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&logits), bits(&again));
    // In parts it is the same model.
    let parts = Sketch::sound()
        .writer()
        .write_split(&dir.path().join("parts"), 20_000);
    let parts = parts.expect("it can be split");
    assert!(parts.len() > 2);
    let split = load(&parts[1], MapMode::Mmap).unwrap_or_else(|e| panic!("{e}"));
    let split = step(&split.model).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(bits(&logits), bits(&split));
}

/// Every length that a file can be cut to.
#[test]
fn no_cut_is_taken_for_a_model() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("cut.gguf");
    let bytes = Sketch::sound().bytes();
    let data = Header::parse(&bytes).expect("it is sound").data_start as usize;
    let end = damaged::data_end(&bytes);
    fs::write(&path, &bytes).expect("it can be written");
    let file = OpenOptions::new()
        .write(true)
        .open(&path)
        .expect("it is there");
    let in_data = (data..end).rev().filter(|n| n % 97 == 0 || *n == end - 1);
    let mut n_cuts = 0;
    for len in in_data.chain((0..data).rev()) {
        file.set_len(len as u64).expect("it can be cut");
        let options = LoadOptions {
            threads: Some(1),
            ..LoadOptions::default()
        };
        let loaded = Model::load(&path, &options, &mut |_| {});
        assert!(loaded.is_err(), "cut to {len} bytes it was taken");
        n_cuts += 1;
    }
    assert!(n_cuts > data);
}

/// Every byte of the header, changed in two ways: an error, or a model that runs.
#[test]
fn no_changed_byte_is_a_panic() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("changed.gguf");
    let bytes = Sketch::sound().bytes();
    let data = Header::parse(&bytes).expect("it is sound").data_start as usize;
    fs::write(&path, &bytes).expect("it can be written");
    let mut file = OpenOptions::new()
        .write(true)
        .open(&path)
        .expect("it is there");
    let put = |file: &mut File, at: usize, byte: u8| {
        file.seek(SeekFrom::Start(at as u64)).expect("inside");
        file.write_all(&[byte]).expect("it can be written");
    };
    let (mut refused, mut taken) = (0, 0);
    for (at, &byte) in bytes[..data].iter().enumerate() {
        for changed in [!byte, byte ^ 1 << (at % 8)] {
            put(&mut file, at, changed);
            let result = catch_unwind(AssertUnwindSafe(|| {
                load(&path, MapMode::Mmap).and_then(|loaded| step(&loaded.model))
            }));
            match result {
                Ok(Ok(_)) => taken += 1,
                Ok(Err(_)) => refused += 1,
                Err(_) => panic!("byte {at} as {changed:#x} (not {byte:#x})"),
            }
        }
        put(&mut file, at, byte);
    }
    println!("{refused} refused, {taken} taken");
    assert!(refused > taken, "{refused} refused, {taken} taken");
}
