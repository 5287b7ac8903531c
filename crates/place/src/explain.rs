//! A plan in words: one record for the log, and what `plan` prints.

use std::fmt::Write as _;

use crate::cost::{Bound, Place, SpillModel};
use crate::decide::{Plan, Prefer, Spill};
use crate::drop::Binding;

/// `bytes` as MiB with as many decimals as are sure, and to the byte.
fn exact(bytes: u64) -> String {
    format!("{} ({bytes} bytes)", short(bytes))
}

fn short(bytes: u64) -> String {
    let mib = bytes as f64 / f64::from(1 << 20);
    if mib >= 10_240.0 {
        format!("{:.2} GiB", mib / 1024.0)
    } else if mib >= 100.0 {
        format!("{mib:.0} MiB")
    } else {
        format!("{mib:.2} MiB")
    }
}

fn percent(x: f64) -> String {
    format!("{:.1} %", x * 100.0)
}

impl Plan {
    /// What fast memory is called where this plan runs.
    fn fast_name(&self) -> &'static str {
        match self.memory.place {
            Place::Host => "main memory",
            Place::VirtualDevice => "memory that plays a device's",
            Place::Device => "device memory",
        }
    }

    /// The plan, line by line, without a line's end.
    pub fn explain(&self) -> Vec<String> {
        let mut lines = vec![
            format!(
                "model {}: weights {}, of them routed experts {}; a token reads {}",
                self.model,
                exact(self.weight_bytes),
                exact(self.expert_bytes),
                exact(self.active_bytes_per_token),
            ),
            format!(
                "asked: {} cells for {} sequence(s), {} tokens at a time, spill {}",
                self.n_ctx,
                self.n_seq,
                self.n_ubatch,
                self.spill_words(),
            ),
            format!(
                "profile {} ({}): {} {} free, host memory beyond it {}; {} threads",
                self.profile,
                self.profile_source,
                self.fast_name(),
                exact(self.memory.fast_bytes),
                exact(self.memory.host_bytes),
                self.threads,
            ),
        ];
        if self.memory.place != Place::Host {
            lines.push(self.rates_line());
        }
        lines.push(format!(
            "room for KV beside all weights, work space ({}) and state ({}): {}",
            exact(self.work_bytes),
            exact(self.recurrent_bytes),
            exact(self.kv_budget_bytes),
        ));
        lines.extend(self.tier_lines());
        lines.push(format!(
            "choice: {} with KV {} ({} in our blocks): {}",
            self.choice,
            exact(self.kv_bytes),
            exact(self.kv_alloc_bytes),
            self.reason,
        ));
        lines.extend(self.hints.iter().map(|hint| format!("hint: {hint}")));
        if self.fits {
            lines.extend(self.layout_lines());
            lines.extend(self.prediction_lines());
        }
        if self.beyond_training() {
            lines.push(format!(
                "warning: the model was trained with {} cells; beyond them its answers are not what it learnt",
                self.n_ctx_train,
            ));
        }
        let assumed = self.assumptions.iter();
        lines.extend(assumed.map(|what| format!("assumed: {what}")));
        lines
    }

    /// The decision as one record for a log.
    pub fn record(&self) -> String {
        let mut text = format!(
            "plan: {} at {} cells, budget for KV {}",
            self.choice,
            self.n_ctx,
            short(self.kv_budget_bytes)
        );
        for t in &self.tiers {
            let _ = write!(text, "; {} {}", t.tier(), short(t.kv_bytes));
            if t.over_bytes > 0 {
                let over = short(t.over_bytes);
                let _ = write!(text, " over by {over}, T* {}", short(t.t_star_bytes));
            }
        }
        if self.memory.place != Place::Host {
            let _ = write!(text, "; {}", self.rates_line());
        }
        let _ = write!(text, "; {}", self.reason);
        for hint in &self.hints {
            let _ = write!(text, "; hint: {hint}");
        }
        text
    }

    fn spill_words(&self) -> String {
        let model = match self.spill_model {
            SpillModel::Additive => "additive model, slow-down",
            SpillModel::Overlapped => "overlapped model, drop",
        };
        let prefer = match self.prefer {
            Prefer::Quality => "quality",
            Prefer::Speed => "speed",
        };
        match self.spill {
            Spill::Off => format!("off; prefer {prefer}"),
            Spill::Mib(mib) => format!("up to {mib} MiB; prefer {prefer}"),
            Spill::Auto => format!(
                "auto ({model} of at most {}); prefer {prefer}",
                percent(self.spill_drop)
            ),
        }
    }

    fn rates_line(&self) -> String {
        let r = &self.rates;
        let binds = match r.binds {
            Binding::Link => "the link",
            Binding::HostMemory => "host memory",
        };
        format!(
            "link {:.1} GB/s, host memory {:.1} GB/s: {binds} binds at {:.1} GB/s; CPU attention {:.1} GB/s, {} {:.0} GB/s",
            r.link_gb_s,
            r.host_read_gb_s,
            r.bw_eff_gb_s,
            r.cpu_attention_gb_s,
            self.fast_name(),
            r.fast_read_gb_s,
        )
    }

    fn tier_lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for t in &self.tiers {
            let tok_s = if t.fits {
                format!(
                    "{:.2} tok/s at full context, a drop of {}",
                    t.tok_s,
                    percent(t.drop)
                )
            } else {
                "does not fit".to_owned()
            };
            lines.push(format!(
                "{:<10} KV {}, spill {}, T* {}: {tok_s}; fits up to {} cells ({} with spill)",
                t.tier().to_string(),
                exact(t.kv_bytes),
                exact(t.spill_bytes),
                exact(t.t_star_bytes),
                t.max_ctx,
                t.max_ctx_spilled,
            ));
            // One way to place a tier needs no comparison.
            if t.candidates.len() < 2 {
                continue;
            }
            for c in &t.candidates {
                let mut line = format!("  {:<15}", c.kind.label());
                for p in &c.predicted {
                    let _ = write!(line, " {:.2} tok/s at {}", p.tok_s, p.depth);
                    line.push(',');
                }
                line.pop();
                if !c.fits {
                    line.push_str(" (no room)");
                } else if !c.within_target {
                    line.push_str(" (beyond the target)");
                }
                lines.push(line);
            }
        }
        lines
    }

    fn layout_lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        let l = &self.layout;
        for (name, parts, total) in [
            (self.fast_name(), &l.fast, l.fast_bytes),
            ("host memory", &l.host, l.host_bytes),
        ] {
            if parts.is_empty() {
                continue;
            }
            lines.push(format!("{name}: {}", exact(total)));
            let part = |p: &crate::decide::Part| format!("  {}: {}", p.what, exact(p.bytes));
            lines.extend(parts.iter().map(part));
        }
        if l.tail_cells > 0 {
            lines.push(format!(
                "window {} cells, tail {} cells when the context is full, {} of it by the CPU",
                l.window_cells,
                l.tail_cells,
                percent(self.cpu_share),
            ));
        }
        if l.host.iter().any(|p| p.what == "experts") {
            let from = if self.expert_use_known {
                "by what was learnt of their use"
            } else {
                "as if all were used alike"
            };
            let hits = percent(l.expert_hits.unwrap_or(0.0));
            lines.push(format!(
                "expert cache: {} slots, {}: {hits} of a token's experts are expected in it, {from}; {} more for streamed ones",
                l.expert_slots,
                exact(l.expert_cache_bytes),
                l.expert_staging_slots,
            ));
        }
        if l.staging_slots > 0 {
            let of = exact(l.staging_slot_bytes);
            let streamed = self
                .predicted
                .last()
                .map_or(0.0, |p| p.token.streamed_bytes);
            let mut line = format!("staging: {} slots of {of}", l.staging_slots);
            if streamed > 0.0 {
                let _ = write!(
                    line,
                    ", through which {} a token go at full context: while one half of them is attended the other is filled",
                    exact(streamed as u64)
                );
            }
            lines.push(line);
        }
        lines
    }

    fn prediction_lines(&self) -> Vec<String> {
        let line = |p: &crate::decide::Predicted| {
            let t = &p.token;
            let bound = match p.bound() {
                Bound::Compute => "compute",
                Bound::Link => "the link",
                Bound::HostMemory => "host memory",
            };
            format!(
                "predicted at {:>6} cells: {:.2} tok/s = {:.3} ms (weights {:.3}, experts {:.3}, operations {:.3}, attention {:.3}, state {:.3}, spill {:.3}); {bound} binds",
                p.depth,
                p.tok_s,
                t.t_ms,
                t.weights_ms,
                t.experts_ms,
                t.operations_ms,
                t.attention_ms,
                t.state_ms,
                t.spill_ms,
            )
        };
        self.predicted.iter().map(line).collect()
    }
}
