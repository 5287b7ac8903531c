//! What the rows are, and what is planned for each.

use std::fmt;

use gguf::GgufFile;
use place::cost::Token;
use place::decide::Request;
use place::profile::Profile;
use place::tier::{self, LADDER, Tier};

use crate::plan::describe::describe;
use crate::plan::session::{Asked, SessionPlan, available_bytes, plan, token_at};

/// A row of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Setting {
    /// A tier with everything in fast memory, whatever the budget is.
    Resident(Tier),
    /// The least compressing tier within the budget, spilled as far as it must be.
    Spilled,
    /// What is chosen within the budget.
    Auto,
}

impl Setting {
    /// The rows of a table: the four that matter first, then what is left of the ladder.
    pub fn of_ladder(tiers: &[Tier]) -> Vec<Self> {
        let [f16, q8_0, ..] = LADDER;
        let first = [
            Self::Resident(f16),
            Self::Spilled,
            Self::Resident(q8_0),
            Self::Auto,
        ];
        let others = LADDER[2..].iter().map(|&tier| Self::Resident(tier));
        let has = |setting: &Self| match setting {
            Self::Resident(tier) => tiers.contains(tier),
            Self::Spilled | Self::Auto => true,
        };
        first.into_iter().chain(others).filter(has).collect()
    }

    /// What is asked of a session, where this is asked in general.
    pub fn of(self, asked: &Asked) -> Asked {
        let pinned = |tier: Tier, request: Request| Request {
            type_k: Some(tier.type_k),
            type_v: Some(tier.type_v),
            ..request
        };
        let request = asked.request;
        let request = match self {
            Self::Auto => request,
            Self::Spilled => pinned(LADDER[0], request),
            Self::Resident(tier) => Request {
                device_mem_mib: None,
                vram_target_mib: 0,
                window_cells: None,
                expert_cache: None,
                ..pinned(tier, request)
            },
        };
        Asked { request, ..*asked }
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let short = |tier: &Tier| {
            if tier.type_k == tier.type_v {
                tier.type_k.to_string()
            } else {
                tier.to_string()
            }
        };
        match self {
            Self::Resident(tier) => write!(f, "{} resident", short(tier)),
            Self::Spilled => write!(f, "{} spilled", short(&LADDER[0])),
            Self::Auto => f.write_str("auto"),
        }
    }
}

/// A row as it was planned.
#[derive(Debug, Clone)]
pub struct Row {
    /// Which one it is.
    pub setting: Setting,
    /// Its plan.
    pub planned: SessionPlan,
    /// What a token will take at the depth that is measured; `None` if the plan does not fit.
    pub token: Option<Token>,
    /// An earlier row with the same session, if there is one.
    pub same_as: Option<usize>,
    /// Why it is not measured.
    pub left_out: Option<String>,
}

/// Plans all rows, the one that the others are compared with first. `depth` is what tokens a second are measured at.
///
/// What has no room beside the rows before it, or by itself, is left out, and says so.
///
/// # Errors
/// If the header describes no model, or what is asked cannot be met by any machine.
pub fn rows(
    file: &GgufFile,
    asked: &Asked,
    machine: &Profile,
    depth: u64,
) -> Result<Vec<Row>, place::Error> {
    let tiers = tier::allowed(&describe(file)?, None, None)?;
    let mut rows: Vec<Row> = Vec::new();
    for setting in Setting::of_ladder(&tiers) {
        let asked = setting.of(asked);
        let planned = plan(file, &asked, machine)?;
        let token = token_at(file, &asked, machine, &planned, depth)?;
        let left_out = planned.plan.refusal();
        let same = |row: &Row| row.left_out.is_none() && row.planned.options == planned.options;
        let same_as = rows.iter().position(same).filter(|_| left_out.is_none());
        rows.push(Row {
            setting,
            planned,
            token,
            same_as,
            left_out,
        });
    }
    leave_out(&mut rows, available_bytes(asked.device, machine));
    Ok(rows)
}

/// Leaves out what has no room beside the weights and the rows before it.
fn leave_out(rows: &mut [Row], available: u64) {
    let shared = rows.first().map_or(0, |row| row.planned.shared_bytes());
    let mut room = available.saturating_sub(shared);
    for at in 0..rows.len() {
        if let Some(same) = rows[at].same_as {
            rows[at].left_out = rows[same].left_out.clone();
        }
        if rows[at].same_as.is_some() || rows[at].left_out.is_some() {
            continue;
        }
        let needed = rows[at].planned.session_bytes();
        if needed > room {
            let mib = |bytes: u64| bytes >> 20;
            rows[at].left_out = Some(format!(
                "needs {} MiB beside the weights and the rows above, {} MiB are left",
                mib(needed),
                mib(room)
            ));
            continue;
        }
        room -= needed;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use place::bytes::KvType;
    use place::decide::Spill;

    #[test]
    fn the_four_that_matter_come_first() {
        let names = |tiers: &[Tier]| -> Vec<String> {
            let rows = Setting::of_ladder(tiers).into_iter();
            rows.map(|s| s.to_string()).collect()
        };
        let all = [
            "f16 resident",
            "f16 spilled",
            "q8_0 resident",
            "auto",
            "q8_0/q4_0 resident",
            "q4_0 resident",
        ];
        assert_eq!(names(&LADDER), all);
        assert_eq!(names(&LADDER[..1]), ["f16 resident", "f16 spilled", "auto"]);
    }

    #[test]
    fn a_budget_is_for_what_is_spilled_or_chosen() {
        let asked = Asked {
            n_ctx: Some(4096),
            request: Request {
                device_mem_mib: Some(500),
                vram_target_mib: 600,
                window_cells: Some(512),
                spill: Spill::Mib(7),
                kv_share: Some(0.5),
                type_k: Some(KvType::Q8_0),
                ..Request::default()
            },
            rotate: false,
            ..Asked::default()
        };
        assert_eq!(Setting::Auto.of(&asked), asked);
        let spilled = Setting::Spilled.of(&asked).request;
        let f16 = Some(KvType::F16);
        assert_eq!((spilled.type_k, spilled.type_v), (f16, f16));
        assert_eq!(
            (spilled.device_mem_mib, spilled.window_cells),
            (Some(500), Some(512))
        );
        let resident = Setting::Resident(LADDER[2]).of(&asked);
        assert_eq!((resident.n_ctx, resident.rotate), (Some(4096), false));
        let request = resident.request;
        assert_eq!(
            (request.type_k, request.type_v),
            (Some(KvType::Q8_0), Some(KvType::Q4_0))
        );
        let budget = (
            request.device_mem_mib,
            request.vram_target_mib,
            request.window_cells,
        );
        assert_eq!(budget, (None, 0, None));
    }
}
