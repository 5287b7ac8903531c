use super::device::Places;
use super::load::{Fill, Sink, fill_with};
use super::pieces::{Job, PIECE_BYTES, Piece, Pieces};
use super::source::Source;
use super::staged::{Carrier, Staged, slots};
use crate::error::Error;
use crate::synth::{Generator, Recipe};
use cpu::mem::ALIGN;
use cpu::pool::{Pinning, Pool};
use cuda::experts::Blobs;
use gguf::write::Writer;
use gguf::{GgufFile, TensorType};
use quant::tile::{Layout, ROWS};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Matrices of several formats: of one row, of part of a tile, of more than a piece, with tiles larger than a piece.
const SHAPES: [(TensorType, usize, usize); 6] = [
    (TensorType::Q8_0, 1, 64),
    (TensorType::Q4_K, 17, 512),
    (TensorType::Q6_K, 1601, 4096),
    (TensorType::F32, 40, 1 << 16),
    (TensorType::F16, 48, 160),
    (TensorType::Q4_0, 4095, 1024),
];

/// A header with these matrices, in the file in another order than they are asked for.
fn header() -> GgufFile {
    let mut writer = Writer::new(32).unwrap();
    for (i, (ty, n, k)) in SHAPES.into_iter().enumerate().rev() {
        let dims = [k as u64, n as u64];
        let name = format!("{i}.weight");
        writer.tensor_from(&name, ty, &dims, |_| Ok(())).unwrap();
    }
    let (header, _) = writer.header().unwrap();
    GgufFile::from_header("matrices", &header).unwrap()
}

fn source(file: &GgufFile) -> Source<'_> {
    let recipe = Recipe {
        seed: 3,
        router_skew: 0.0,
    };
    let generator = Generator::new(recipe, file.tensors()).unwrap();
    Source::Synthetic(file, generator)
}

fn jobs<'a>(source: &Source<'a>) -> Vec<Job<'a>> {
    let mut start = 0;
    let job = |(i, (ty, n, k)): (usize, (TensorType, usize, usize))| {
        let job = Job {
            tensor: source.tensor(&format!("{i}.weight")).unwrap(),
            offset: 0,
            layout: Layout::of(ty).unwrap(),
            n,
            k,
            start,
            of_expert: None,
        };
        start += job.bytes();
        job
    };
    SHAPES.into_iter().enumerate().map(job).collect()
}

#[test]
fn an_expert_is_pinned_as_a_whole_or_not() {
    let file = header();
    let source = source(&file);
    let mut jobs = jobs(&source);
    // A layer's two experts of two matrices each, something else, and another layer's first one.
    let whose = [Some(0), Some(0), Some(1), Some(1), None, Some(1)];
    jobs.iter_mut()
        .zip(whose)
        .for_each(|(job, e)| job.of_expert = e);
    let places = Places::new(&jobs);
    let starts: Vec<usize> = places.starts.iter().flatten().copied().collect();
    assert_eq!(places.starts[4], None);
    assert_eq!(places.blobs, [starts[0], starts[2], starts[4]]);
    assert!(starts.iter().all(|start| start.is_multiple_of(ALIGN)));
    let part = |most| Blobs::pinned_part(&places.blobs, places.end, most);
    let cases = [
        (0, 0),
        (starts[1] + 1, 0),
        (starts[3], starts[2]),
        (places.end - 1, starts[4]),
        (places.end, places.end),
    ];
    for (most, pinned) in cases {
        assert_eq!(part(most), pinned, "{most} of {places:?}");
    }
}

#[test]
fn pieces_are_every_byte_once_in_the_order_of_the_file() {
    let file = header();
    let source = source(&file);
    let jobs = jobs(&source);
    let pieces = Pieces::new(&jobs);
    let mut taken: Vec<usize> = vec![0; jobs.len()];
    let mut before = 0;
    for number in 0..pieces.len() {
        let piece = pieces.get(number);
        let job = &jobs[piece.matrix];
        assert_eq!(piece.at.start, taken[piece.matrix]);
        assert_eq!(piece.at.start, piece.first * job.tile_bytes());
        assert!(piece.at.len() <= pieces.bytes_max());
        assert!(piece.at.len() <= PIECE_BYTES.max(job.tile_bytes()));
        taken[piece.matrix] = piece.at.end;
        let offset = job.tensor.offset + piece.at.start as u64;
        assert!(offset >= before, "the file is read onward");
        before = offset;
    }
    let all: Vec<usize> = jobs.iter().map(Job::bytes).collect();
    assert_eq!(taken, all);
    assert!(pieces.len() > jobs.len());
}

/// Keeps pieces as they come.
struct Plain(Vec<Mutex<Vec<u8>>>);

impl Plain {
    fn new(jobs: &[Job<'_>]) -> Self {
        Self(
            jobs.iter()
                .map(|j| Mutex::new(vec![0; j.bytes()]))
                .collect(),
        )
    }
}

impl Sink for Plain {
    fn put(&self, _: usize, piece: &Piece, fill: Fill<'_>) -> Result<(), Error> {
        let mut bytes = vec![0; piece.at.len()];
        fill(&mut bytes)?;
        self.0[piece.matrix].lock().unwrap()[piece.at.clone()].copy_from_slice(&bytes);
        Ok(())
    }
}

/// A slot of a slow carrier: what is written to it before it has arrived arrives, too.
struct Slow {
    memory: Arc<Mutex<Vec<u8>>>,
    scratch: Vec<u8>,
    arrived: Arc<AtomicBool>,
}

type Sent = (Arc<Mutex<Vec<u8>>>, Arc<AtomicBool>, Piece);

/// Carries slots in the order in which they were sent, some time later.
struct Later {
    queue: Mutex<Sender<Sent>>,
    waits: Arc<AtomicUsize>,
}

impl Carrier for Later {
    type Slot = Slow;

    fn memory<'s>(&self, slot: &'s mut Slow) -> Result<&'s mut [u8], Error> {
        while !slot.arrived.load(Ordering::Acquire) {
            self.waits.fetch_add(1, Ordering::Relaxed);
            std::thread::sleep(Duration::from_micros(50));
        }
        Ok(&mut slot.scratch)
    }

    fn send(&self, slot: &mut Slow, piece: &Piece) -> Result<(), Error> {
        slot.memory.lock().unwrap().copy_from_slice(&slot.scratch);
        slot.arrived.store(false, Ordering::Release);
        let sent = (slot.memory.clone(), slot.arrived.clone(), piece.clone());
        self.queue.lock().unwrap().send(sent).unwrap();
        Ok(())
    }
}

#[test]
fn staged_pieces_arrive_as_they_were_filled() {
    let file = header();
    let source = source(&file);
    let jobs = jobs(&source);
    let pieces = Pieces::new(&jobs);
    let expected = Plain::new(&jobs);
    let one = Pool::new(1, Pinning::Free).unwrap();
    let digest = fill_with(&source, &jobs, &one, &mut |_, _| {}, &expected).unwrap();
    for threads in [1, 3] {
        let pool = Pool::new(threads, Pinning::Free).unwrap();
        let arrived = Plain::new(&jobs);
        let (queue, sent) = channel::<Sent>();
        let waits = Arc::new(AtomicUsize::new(0));
        let later = Later {
            queue: Mutex::new(queue),
            waits: Arc::clone(&waits),
        };
        assert!(pieces.len() > slots(threads), "slots are used again");
        let slot = |_| Slow {
            memory: Arc::new(Mutex::new(vec![0; pieces.bytes_max()])),
            scratch: vec![0; pieces.bytes_max()],
            arrived: Arc::new(AtomicBool::new(true)),
        };
        let staged = Staged::new(later, (0..slots(threads)).map(slot));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // Nothing arrives before somebody waits for it, so that what is written meanwhile would show.
                let end = Instant::now() + Duration::from_secs(20);
                while waits.load(Ordering::Relaxed) == 0 && Instant::now() < end {
                    std::thread::sleep(Duration::from_micros(50));
                }
                for (memory, done, piece) in sent {
                    std::thread::sleep(Duration::from_micros(500));
                    let memory = memory.lock().unwrap();
                    let mut to = arrived.0[piece.matrix].lock().unwrap();
                    to[piece.at.clone()].copy_from_slice(&memory[..piece.at.len()]);
                    done.store(true, Ordering::Release);
                }
            });
            let again = fill_with(&source, &jobs, &pool, &mut |_, _| {}, &staged).unwrap();
            assert_eq!(digest, again, "the same wherever pieces go");
            // The carrier's thread ends with its queue.
            drop(staged);
            assert!(waits.load(Ordering::Relaxed) > 0, "slots are waited for");
        });
        for (expected, arrived) in expected.0.iter().zip(arrived.0) {
            assert!(*expected.lock().unwrap() == arrived.into_inner().unwrap());
        }
    }
}

#[test]
fn tiles_are_those_that_kernels_read() {
    let file = header();
    let source = source(&file);
    let jobs = jobs(&source);
    let sink = Plain::new(&jobs);
    let pool = Pool::new(2, Pinning::Free).unwrap();
    fill_with(&source, &jobs, &pool, &mut |_, _| {}, &sink).unwrap();
    for (job, tiles) in jobs.iter().zip(sink.0) {
        let tiles = tiles.into_inner().unwrap();
        let matrix = quant::tile::TileMatrix::new(job.tensor.ty, job.n, job.k, &tiles);
        let mut file = vec![0; job.bytes()];
        source.read(job.tensor, 0, &mut file).unwrap();
        let bytes = job.layout.block_bytes();
        let mut block = vec![0; bytes];
        for row in [0, job.n / 2, job.n - 1] {
            for b in 0..job.k / job.layout.block_len() {
                matrix.file_block(row, b, &mut block);
                let at = row * job.row_bytes() + b * bytes;
                assert_eq!(block, file[at..at + bytes], "{} {row}", job.tensor.name);
            }
        }
    }
    assert!(jobs.iter().any(|job| job.n % ROWS != 0));
}

/// Fails at one piece.
struct Fails(usize, AtomicUsize);

impl Sink for Fails {
    fn put(&self, number: usize, _: &Piece, _: Fill<'_>) -> Result<(), Error> {
        self.1.fetch_add(1, Ordering::Relaxed);
        if number == self.0 {
            return Err(Error::Options("full".to_owned()));
        }
        Ok(())
    }
}

#[test]
fn after_a_failure_nothing_more_is_begun() {
    let file = header();
    let source = source(&file);
    let jobs = jobs(&source);
    let pool = Pool::new(1, Pinning::Free).unwrap();
    let sink = Fails(2, AtomicUsize::new(0));
    let mut told = 0;
    let failed = fill_with(&source, &jobs, &pool, &mut |done, _| told = done, &sink);
    assert!(matches!(failed, Err(Error::Options(_))), "{failed:?}");
    assert_eq!(sink.1.into_inner(), 3);
    let pieces = Pieces::new(&jobs);
    let done = pieces.get(0).at.len() + pieces.get(1).at.len();
    assert_eq!(told, done as u64);

    // A file that lacks what its header says.
    let sink = Plain::new(&jobs);
    let lacking = Source::File(&file);
    let failed = fill_with(&lacking, &jobs, &pool, &mut |_, _| {}, &sink);
    assert!(matches!(failed, Err(Error::Gguf(_))), "{failed:?}");
}
