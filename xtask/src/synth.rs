//! `synth`: a model file in the shape of a known model, with random weights.
//!
//! Threads make pieces of tensors and write each where it belongs, so the file is as fast as the disk. What bytes it has depends on shape,
//! seed and skew alone.

use std::cell::RefCell;
use std::fs::{self, File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use clap::Args;
use cpu::pool::{Pinning, Pool};
use engine::synth::{Generator, Recipe, Shape};
use gguf::TensorInfo;

use crate::machine;

/// Bytes made and written at a time, about.
const PIECE_BYTES: usize = 8 << 20;

/// Between two lines that say how far it is.
const TELL_EVERY: Duration = Duration::from_secs(2);

#[derive(Debug, Args)]
pub struct SynthArgs {
    /// A known shape, or a GGUF file, with or without tensor data; with :TYPE behind it quantised matrices have that type
    #[arg(long, value_name = "NAME[:TYPE]")]
    like: String,
    /// The file to write
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// What the random weights begin from
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Type of all quantised matrices
    #[arg(long = "type", value_name = "TYPE")]
    ty: Option<String>,
    /// How unevenly experts are used: row e of a router is multiplied with (1 + rank(e)) ^ -S, ranks being shuffled in each layer
    #[arg(long, value_name = "S", default_value_t = 0.0)]
    router_skew: f32,
    /// Threads
    #[arg(short, long, value_name = "N", default_value_t = machine::cores())]
    threads: usize,
}

thread_local! {
    /// What a thread has made of the file.
    static MADE: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

pub fn run(args: &SynthArgs) -> Result<()> {
    let mut shape = Shape::find(&args.like)?;
    if let Some(ty) = &args.ty {
        shape = shape.with_type(ty)?;
    }
    let recipe = Recipe {
        seed: args.seed,
        router_skew: args.router_skew,
    };
    let begun = Instant::now();
    let bytes = write(&shape, recipe, &args.output, args.threads)?;
    let seconds = begun.elapsed().as_secs_f64();
    let gb = bytes as f64 / 1e9;
    println!(
        "{}: {}, {gb:.2} GB in {seconds:.1} s, {:.2} GB/s",
        args.output.display(),
        shape.name(),
        gb / seconds
    );
    Ok(())
}

/// Writes the file, which gets its name when it is complete. Returns its bytes.
fn write(shape: &Shape, recipe: Recipe, path: &Path, threads: usize) -> Result<u64> {
    let (head, header) = shape.header()?;
    let generator = Generator::new(recipe, &header.tensors)?;
    let end = header.tensors.iter().map(|t| t.offset + t.n_bytes()).max();
    let end = end.unwrap_or(head.len() as u64);
    let bytes = end.next_multiple_of(u64::from(header.alignment));
    let folder = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let free = fs4::available_space(folder)
        .with_context(|| format!("asking how much is free in {}", folder.display()))?;
    ensure!(
        bytes <= free,
        "{} needs {bytes} bytes, {} has {free} free",
        path.display(),
        folder.display()
    );
    let mut temporary = tempfile::Builder::new()
        .prefix(".synth-")
        .tempfile_in(folder)
        .with_context(|| format!("making a file in {}", folder.display()))?;
    let writing = || format!("writing {}", path.display());
    temporary.write_all(&head).with_context(writing)?;
    temporary.as_file().set_len(bytes).with_context(writing)?;
    let pieces = pieces(&header.tensors);
    let pool = Pool::new(threads, Pinning::Free)?;
    let progress = Progress::new(bytes);
    let failed: Mutex<Option<std::io::Error>> = Mutex::new(None);
    pool.run(pieces.len(), |i| {
        let failure = || failed.lock().unwrap_or_else(PoisonError::into_inner);
        if failure().is_some() {
            return;
        }
        let piece = &pieces[i];
        let written = MADE.with_borrow_mut(|bytes| {
            bytes.resize(piece.bytes, 0);
            generator.fill(piece.tensor, piece.at, bytes);
            put(temporary.path(), piece.tensor.offset + piece.at, bytes)
        });
        match written {
            Ok(()) => progress.add(piece.bytes as u64),
            Err(error) => {
                failure().get_or_insert(error);
            }
        }
    });
    if let Some(error) = failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        let done = progress.done.into_inner();
        let after = format!("{} after {done} of {bytes} bytes", writing());
        return Err(anyhow!(error).context(after));
    }
    eprintln!("synth: waiting for the disk");
    temporary.as_file().sync_all().with_context(writing)?;
    readable(temporary.as_file())?;
    // Without the error's hold on it, what is left of a failure is removed at once.
    let named = temporary.persist(path).map_err(|failed| failed.error);
    named.with_context(writing)?;
    Ok(bytes)
}

/// Temporary files are for their owner alone; this one is to be as others are.
fn readable(file: &File) -> Result<()> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        file.set_permissions(fs::Permissions::from_mode(0o644))?;
    }
    #[cfg(not(unix))]
    let _ = file;
    Ok(())
}

/// Whole blocks of a tensor.
struct Piece<'a> {
    tensor: &'a TensorInfo,
    at: u64,
    bytes: usize,
}

fn pieces(tensors: &[TensorInfo]) -> Vec<Piece<'_>> {
    let mut pieces = Vec::new();
    for tensor in tensors {
        let block = tensor.ty.block_bytes();
        let step = PIECE_BYTES / block * block;
        let mut at = 0;
        while at < tensor.n_bytes() {
            let left = tensor.n_bytes() - at;
            let bytes = usize::try_from(left).map_or(step, |left| left.min(step));
            pieces.push(Piece { tensor, at, bytes });
            at += bytes as u64;
        }
    }
    pieces
}

fn put(path: &Path, at: u64, bytes: &[u8]) -> std::io::Result<()> {
    let mut file = OpenOptions::new().write(true).open(path)?;
    file.seek(SeekFrom::Start(at))?;
    file.write_all(bytes)
}

/// How far it is, on stderr.
struct Progress {
    begun: Instant,
    total: u64,
    done: AtomicU64,
    told: Mutex<Instant>,
}

impl Progress {
    fn new(total: u64) -> Self {
        let begun = Instant::now();
        Self {
            begun,
            total,
            done: AtomicU64::new(0),
            told: Mutex::new(begun),
        }
    }

    fn add(&self, bytes: u64) {
        let done = self.done.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let Ok(mut told) = self.told.try_lock() else {
            return;
        };
        if told.elapsed() >= TELL_EVERY {
            *told = Instant::now();
            let gb = |bytes: u64| bytes as f64 / 1e9;
            let rate = gb(done) / self.begun.elapsed().as_secs_f64();
            eprintln!(
                "synth: {:.2} of {:.2} GB, {rate:.2} GB/s",
                gb(done),
                gb(self.total)
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gguf::write::Writer;
    use gguf::{GgufFile, MapMode, TensorType};

    fn shape(folder: &Path) -> Shape {
        let mut writer = Writer::new(32).unwrap();
        writer.set("general.architecture", "llama").unwrap();
        let mut add = |name: &str, ty, dims: &[u64]| {
            writer.tensor_from(name, ty, dims, |_| Ok(())).unwrap();
        };
        add("token_embd.weight", TensorType::Q8_0, &[4096, 4100]);
        add("blk.0.ffn_up.weight", TensorType::Q6_K, &[4096, 3]);
        add("output_norm.weight", TensorType::F32, &[5]);
        let (header, _) = writer.header().unwrap();
        let path = folder.join("shape.gguf");
        fs::write(&path, header).unwrap();
        Shape::find(path.to_str().unwrap()).unwrap()
    }

    #[test]
    fn the_file_is_the_same_with_any_number_of_threads_and_holds_what_was_made() {
        let folder = tempfile::tempdir().unwrap();
        let shape = shape(folder.path());
        let recipe = Recipe {
            seed: 7,
            router_skew: 0.0,
        };
        let [one, three] = ["one.gguf", "three.gguf"].map(|name| folder.path().join(name));
        let bytes = write(&shape, recipe, &one, 1).unwrap();
        assert_eq!(write(&shape, recipe, &three, 3).unwrap(), bytes);
        assert!(fs::read(&one).unwrap() == fs::read(&three).unwrap());
        assert_eq!(fs::metadata(&one).unwrap().len(), bytes);
        let file = GgufFile::open(&one, MapMode::Read).unwrap();
        let generator = Generator::new(recipe, file.tensors()).unwrap();
        for t in file.tensors() {
            let mut made = vec![0; t.n_bytes() as usize];
            generator.fill(t, 0, &mut made);
            assert!(file.bytes(t).unwrap() == made, "{}", t.name);
        }
        assert!(file.tensors()[0].n_bytes() as usize > 2 * PIECE_BYTES);
    }

    #[test]
    fn what_fails_leaves_no_file() {
        let folder = tempfile::tempdir().unwrap();
        let shape = shape(folder.path());
        let into = folder.path().join("missing");
        let failed = write(&shape, Recipe::default(), &into.join("a.gguf"), 1).unwrap_err();
        assert!(format!("{failed:#}").contains("missing"), "{failed:#}");
        // A folder of that name cannot be replaced.
        fs::create_dir_all(into.join("a.gguf").join("full")).unwrap();
        let failed = write(&shape, Recipe::default(), &into.join("a.gguf"), 1).unwrap_err();
        assert!(format!("{failed:#}").contains("a.gguf"), "{failed:#}");
        assert_eq!(fs::read_dir(&into).unwrap().count(), 1);
    }
}
