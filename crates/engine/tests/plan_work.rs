//! The work space that plans reckon with is what a session takes. A program of its own, because it counts all allocations.

#[path = "common/damaged/mod.rs"]
mod damaged;

use damaged::Sketch;
use engine::model::{LoadOptions, Model};
use engine::plan::describe::describe;
use engine::session::{Session, SessionOptions};
use gguf::{GgufFile, MapMode};
use peak_alloc::PeakAlloc;
use place::bytes::{Cache, kv_alloc_bytes, work_bytes};

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// What a session takes beside buffers: itself, the lists of its layers and sequences, and the like.
const BESIDE_BYTES: u64 = 4096;

// One test: another one beside it would allocate, too.
#[test]
fn planned_and_taken() {
    check(&Sketch::sound());
    check(&Sketch::mixture());
}

fn check(sketch: &Sketch) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    sketch.write(&path);
    let planned = describe(&GgufFile::open(&path, MapMode::Read).unwrap()).unwrap();
    let options = LoadOptions {
        threads: Some(1),
        ..LoadOptions::default()
    };
    let model = Model::load(&path, &options, &mut |_| {}).unwrap();
    for (n_ctx, ubatch) in [(1, 1), (7, 3), (100, 16), (300, 33), (3000, 8), (40, 64)] {
        let options = SessionOptions {
            n_ctx,
            ubatch,
            ..SessionOptions::for_model(model.config())
        };
        let before = ALLOCATOR.current_usage() as u64;
        let session = Session::new(&model, &options).unwrap();
        let taken = ALLOCATOR.current_usage() as u64 - before;
        let work = work_bytes(&planned, n_ctx as u64, ubatch as u64).unwrap();
        assert!(
            (work.total..=work.total + BESIDE_BYTES).contains(&taken),
            "{n_ctx} cells, {ubatch} tokens: {work:?}, taken {taken}"
        );
        assert_eq!(
            work.total,
            session.work_bytes(),
            "{n_ctx} cells, {ubatch} tokens"
        );
        let cache = Cache::new(
            n_ctx as u64,
            place::bytes::KvType::F16,
            place::bytes::KvType::F16,
            ubatch as u64,
        );
        let kv = kv_alloc_bytes(&planned, &cache).unwrap();
        assert_eq!(kv.total, session.kv_bytes(), "{n_ctx} cells");
    }
}
