//! How fast the disk gives a model's bytes.
//!
//! The system keeps what was read lately in memory. Whether a read reached a device it counts for each process; where it
//! did not, or does not say, there is no rate: a cache's would be mistaken for the disk's.

use super::Error;
use super::sample::{Clock, REPETITIONS_MIN, figure};
use place::profile::Figure;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;
use std::time::{Duration, Instant};

/// Bytes read at a time.
const PIECE_BYTES: usize = 4 << 20;

/// Bytes of one reading, which is one stretch of the file.
const READING_BYTES: u64 = 32 << 20;

/// Readings, at most.
const READINGS_MAX: u64 = 5;

/// Readings end after this time.
const TIME_MAX: Duration = Duration::from_millis(1500);

/// A reading counts if at least this part of its bytes came from a device.
const FROM_DEVICE_MIN: f64 = 0.9;

/// What reading a file showed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Disk {
    /// A device's rate, GB/s.
    Rate(Figure),
    /// The file lies in the system's page cache.
    Cached,
    /// The file is too small, or the system does not count what devices give.
    Unknown,
}

/// Reads stretches all over a file.
pub(super) fn measure(path: &Path, clock: &mut Clock<'_>) -> Result<Disk, Error> {
    clock.step("reading the model's file")?;
    if clock.is_over() {
        return Ok(Disk::Unknown);
    }
    let begun = Instant::now();
    let mut file = File::open(path).map_err(Error::io("open", path))?;
    let len = file.metadata().map_err(Error::io("examine", path))?.len();
    let readings = (len / READING_BYTES).min(READINGS_MAX);
    let (mut piece, mut rates, mut counted) = (vec![0; PIECE_BYTES], Vec::new(), true);
    // From the end on: what reads a header or loads a model begins at the start.
    for i in (0..readings).rev() {
        if begun.elapsed() > TIME_MAX {
            break;
        }
        clock.check()?;
        let start = (len - READING_BYTES) / (readings - 1).max(1) * i;
        file.seek(SeekFrom::Start(start))
            .map_err(Error::io("read", path))?;
        let (before, begin) = (device_bytes(), Instant::now());
        let mut left = READING_BYTES as usize;
        while left > 0 {
            let want = left.min(PIECE_BYTES);
            let n = file
                .read(&mut piece[..want])
                .map_err(Error::io("read", path))?;
            if n == 0 {
                return Ok(Disk::Unknown);
            }
            left -= n;
        }
        let seconds = begin.elapsed().as_secs_f64();
        match before.zip(device_bytes()) {
            None => counted = false,
            Some((before, after)) => {
                let from_device = after.saturating_sub(before) as f64;
                if from_device >= FROM_DEVICE_MIN * READING_BYTES as f64 {
                    rates.push(READING_BYTES as f64 / seconds / 1e9);
                }
            }
        }
    }
    Ok(verdict(readings, counted, &rates))
}

fn verdict(readings: u64, counted: bool, rates: &[f64]) -> Disk {
    if rates.len() >= REPETITIONS_MIN {
        Disk::Rate(figure(rates))
    } else if counted && readings > 0 {
        Disk::Cached
    } else {
        Disk::Unknown
    }
}

/// Bytes that devices gave this process so far; `None` where the system does not say.
fn device_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/io").ok()?;
    super::machine::field(&text, "read_bytes")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn measured(bytes: usize) -> Disk {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&vec![1; bytes]).unwrap();
        let mut silent = ();
        let second = Duration::from_secs(1);
        let mut clock = Clock::new(&mut silent, 1, second, second);
        measure(file.path(), &mut clock).unwrap()
    }

    #[test]
    fn a_file_just_written_gives_no_disks_rate() {
        let found = measured(3 * READING_BYTES as usize + 5);
        assert!(matches!(found, Disk::Cached | Disk::Unknown), "{found:?}");
        assert_eq!(measured(1000), Disk::Unknown, "too small");
    }

    #[test]
    fn rates_count_only_if_there_are_enough() {
        assert!(matches!(verdict(5, true, &[1.0, 2.0, 3.0]), Disk::Rate(f) if f.value == 2.0));
        assert_eq!(verdict(5, true, &[1.0, 2.0]), Disk::Cached);
        assert_eq!(verdict(5, false, &[]), Disk::Unknown);
        assert_eq!(verdict(0, true, &[]), Disk::Unknown);
    }
}
