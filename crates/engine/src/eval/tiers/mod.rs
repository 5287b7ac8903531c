//! Every form that a model's cache can have, in one table: what it costs in tokens a second, predicted and measured, and in quality.
//!
//! Start at [`rows`], which plans each row of the table, and [`run`], which measures them. Rows are compared with f16 in fast memory
//! alone, which is planned whatever the budget is. All sessions are there at the same time: tokens a second are measured in turns, a few
//! tokens each, because what a machine's memory does changes from minute to minute.

mod row;
mod run;
mod speed;

pub use row::{Row, Setting, rows};
pub use run::{Needles, Outcome, Progress, Report, Task, TiersError, run};
pub use speed::{Speed, TOKENS_A_ROUND, depth};
