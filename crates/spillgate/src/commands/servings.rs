//! `bench --serve`: tokens a second with a mixture's experts served in several ways.
//!
//! The model is in memory once, each way has a session of its own, and ways take turns: what a machine does meanwhile meets all of them.

use std::time::Instant;

use anyhow::Result;
use engine::experts::Counts;
use engine::plan::session::SessionPlan;
use engine::session::Session;
use serde::Serialize;

use crate::commands::bench::{BenchArgs, Case, Measured, WARM_UP_STEPS, Work, work_of};
use crate::failure::{Advised, Interrupted};
use crate::flags::{ContextFlags, OtherContext, other_context};
use crate::interrupt;
use crate::output::table;
use crate::settings::{Loaded, Need, Opened};

/// A way to serve experts, as it was typed.
#[derive(Debug, Clone)]
pub struct Way {
    text: String,
    flags: OtherContext,
}

impl Way {
    /// Reads flags that are separated by spaces.
    pub fn read(text: &str) -> Result<Self, String> {
        Ok(Self {
            text: text.to_owned(),
            flags: other_context(text)?,
        })
    }

    /// What all ways have in common, with its experts served this way. Threads that copy for nothing are not a way's own.
    fn of(&self, common: &ContextFlags) -> ContextFlags {
        let mut flags = common.clone();
        let (to, own) = (&mut flags.budget, self.flags.flags().budget);
        to.expert_cache = own.expert_cache.or(to.expert_cache);
        (to.cpu_share, to.cpu_share_decode) = (own.cpu_share, own.cpu_share_decode);
        if let Some(own) = own.emulate {
            to.emulate.get_or_insert_default().experts = own.experts;
        }
        flags
    }
}

/// A row of the table: a case in one way.
#[derive(Debug, Serialize)]
pub struct Row {
    way: String,
    #[serde(flatten)]
    measured: Measured,
    /// How its experts were served.
    experts: Counts,
}

/// The plans of all ways.
pub fn plan(args: &BenchArgs, opened: &Opened, needed: usize) -> Result<Vec<SessionPlan>> {
    let plan = |way: &Way| {
        let planned = opened.plan(&way.of(&args.context), Need::Cells(needed))?;
        if planned.options.experts.is_none() {
            let what = format!("'{}' leaves no experts in host memory", way.text);
            return Err(Advised::new(what, "give it a smaller --expert-cache").into());
        }
        Ok(planned)
    };
    args.serve.iter().map(plan).collect()
}

/// Measures all cases in all ways.
pub fn measure(
    args: &BenchArgs,
    loaded: &Loaded,
    plans: &[SessionPlan],
    cases: &[Case],
) -> Result<Vec<Row>> {
    let sessions = plans.iter().map(|plan| Ok(loaded.session_of(plan)?.0));
    let mut sessions = sessions.collect::<Result<Vec<Session<'_>>>>()?;
    let mut rows = Vec::new();
    for &case in cases {
        let ids = work_of(&loaded.model, case);
        let (before, work) = ids.split_at(case.depth);
        let mut begun_with = Vec::new();
        for session in &mut sessions {
            session.truncate(0);
            session.prefill(before, engine::session::Wanted::None)?;
            let warm_up = &work[..WARM_UP_STEPS];
            warm_up.iter().try_for_each(|&id| session.decode(id))?;
            begun_with.push(served(session, case));
        }
        let mut tok_s = vec![Vec::new(); sessions.len()];
        for _ in 0..args.repetitions {
            let ways = args.serve.iter().zip(&mut sessions);
            for ((way, session), tok_s) in ways.zip(&mut tok_s) {
                if interrupt::asked() {
                    return Err(Interrupted.into());
                }
                session.truncate(case.depth);
                let begun = Instant::now();
                case.run(session, work)?;
                let took = begun.elapsed().as_secs_f64();
                tracing::debug!(way = way.text, case = case.name(), ms = took * 1e3);
                tok_s.push(case.tokens() as f64 / took);
            }
        }
        let ways = args.serve.iter().zip(&sessions).zip(begun_with);
        rows.extend(
            ways.zip(tok_s)
                .map(|(((way, session), begun_with), tok_s)| Row {
                    way: way.text.clone(),
                    measured: Measured::new(case, tok_s),
                    experts: served(session, case).since(&begun_with),
                }),
        );
    }
    sessions.iter().for_each(|session| loaded.remember(session));
    Ok(rows)
}

/// How experts were served so far, in steps like a case's.
fn served(session: &Session<'_>, case: Case) -> Counts {
    let [prompt, generated] = session.expert_counts().unwrap_or_default();
    match case.work {
        Work::Prompt(_) => prompt,
        Work::Generate(_) => generated,
    }
}

/// The rows for people.
pub fn text(rows: &[Row]) -> String {
    let head = [
        "CASE", "SERVED", "TOK/S", "FIRST", "MIN", "MAX", "N", "CACHE", "STREAMED", "CPU",
    ];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    lines.extend(rows.iter().map(|row| {
        let (m, counts) = (&row.measured, &row.experts);
        let part = |n: u64| format!("{:.1} %", 100.0 * n as f64 / counts.experts.max(1) as f64);
        vec![
            m.case.clone(),
            row.way.clone(),
            format!("{:.2}", m.median_tok_s),
            // A cache fills with the first ones.
            format!("{:.2}", m.tok_s.first().copied().unwrap_or(0.0)),
            format!("{:.2}", m.min_tok_s),
            format!("{:.2}", m.max_tok_s),
            m.tok_s.len().to_string(),
            part(counts.resident),
            part(counts.streamed),
            part(counts.host),
        ]
    }));
    table(&lines, &[2, 3, 4, 5, 6, 7, 8, 9])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;
    use clap::Parser;
    use engine::experts::Share;

    #[test]
    fn a_way_changes_how_experts_are_served_and_nothing_else() {
        let line = "spillgate bench x --ubatch 64 --emulate hog=3 --cpu-share 0.5";
        let cli = Cli::try_parse_from(line.split(' ')).unwrap();
        let crate::cli::Command::Bench(args) = cli.command else {
            panic!("another command");
        };
        let way =
            Way::read("--expert-cache 25% --cpu-share-decode off --emulate host-copy").unwrap();
        let flags = way.of(&args.context);
        assert_eq!(flags.ubatch, Some(64));
        let budget = flags.budget;
        assert!(budget.expert_cache.is_some());
        assert_eq!(budget.cpu_share, Share::Auto);
        assert_eq!(budget.cpu_share_decode, Share::Off);
        let emulate = budget.emulate.unwrap();
        assert!(emulate.experts.host_copy && emulate.hogs == 3);
        assert!(Way::read("--expert-cache 25% --nothing").is_err());
    }
}
