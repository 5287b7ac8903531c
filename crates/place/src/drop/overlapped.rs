//! The overlapped model: copies of the tail run ahead of use, and the CPU attends over part of it where it lies.
//!
//! ```text
//! t = max( (O + D) / link + rest,  T_other + L * t_layer + engage + max( (KV - C) / device attention, C / cpu + L * t_sync ) )
//! t_layer: what only a tail needs, more of it with a share
//! D + C = tail
//! rest = 0 if D <= L * staging * 3/4, else max(0, T_other - L * staging / 2 / link)
//! ```
//!
//! D bytes are streamed and C bytes attended by the CPU. The layers that can have a tail are alike, so the sum over them is
//! L times one. What is left of the device's attention at no cells comes before the CPU is given its part, and after it has answered. The copies are a timeline of their own (O: what else they carry), which runs ahead as far as the staging slots reach. Where
//! these hold what a layer streams, and some more, it is attended at once, copies go on meanwhile, and the link never rests. Where they do
//! not, a layer is attended by halves of the slots, and the other half is all that is copied while the rest of the model works. While both
//! run, link and CPU keep only a part of their rates, because they share the host's memory.

use super::{amount, bytes, drop_of_slow_down, ms, part};

/// The part of the staging slots that one layer may fill and still be attended at once.
const AT_ONCE: f64 = 0.75;

/// The machine and model as this model sees them. All times are of one token, over all layers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Overlapped {
    /// Copies to the device, alone.
    pub link_gb_s: f64,
    /// CPU attention in bytes of KV, alone.
    pub cpu_gb_s: f64,
    /// Part of its rate that the link keeps while the CPU attends.
    pub link_kept: f64,
    /// Part of its rate that CPU attention keeps while the link is busy.
    pub cpu_kept: f64,
    /// Handing one layer's work to the CPU and back, beside the device's attention at no cells, and what the CPU's takes at none.
    pub t_sync_ms: f64,
    /// Layers that can have a tail.
    pub layers: f64,
    /// Everything but the attention of those layers.
    pub t_other_ms: f64,
    /// The device's attention of those layers at no cells.
    pub attention_engage_ms: f64,
    /// The device's attention in bytes of KV.
    pub attention_gb_s: f64,
    /// KV of those layers, tail included.
    pub kv_bytes: f64,
    /// Copied in each token beside the tail: O.
    pub copied_bytes: f64,
    /// Staging slots for the tail.
    pub staging_bytes: f64,
    /// What each of those layers takes more with a tail, however it is served.
    pub layer_ms: f64,
    /// What it takes more beside that if the CPU has a share.
    pub share_ms: f64,
    /// What a batch of copies takes of the device: it begins when half of the slots can be filled anew, at the earliest once a layer.
    pub batch_ms: f64,
}

/// How a tail is served, and what a token then takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Split {
    /// D.
    pub streamed_bytes: f64,
    /// C.
    pub cpu_bytes: f64,
    /// The whole token.
    pub t_ms: f64,
    /// Whether the copies bind, rather than device and CPU.
    pub link_binds: bool,
}

/// Rates while one of them, or both, run.
#[derive(Clone, Copy)]
struct Rates {
    link: f64,
    cpu: f64,
}

impl Overlapped {
    /// Everything resident.
    pub fn t_resident_ms(&self) -> f64 {
        let kv = ms(self.kv_bytes, self.attention_gb_s);
        let copied = ms(self.copied_bytes, self.link_gb_s);
        let attention = amount(self.attention_engage_ms) + kv;
        copied.max(amount(self.t_other_ms) + attention)
    }

    fn alone(&self) -> Rates {
        Rates {
            link: amount(self.link_gb_s),
            cpu: amount(self.cpu_gb_s),
        }
    }

    fn both(&self) -> Rates {
        Rates {
            link: amount(self.link_gb_s) * part(self.link_kept),
            cpu: amount(self.cpu_gb_s) * part(self.cpu_kept),
        }
    }

    /// Rates for a split: what does not run takes nothing from the other.
    fn rates(&self, streamed: f64, cpu: f64) -> Rates {
        if streamed + amount(self.copied_bytes) > 0.0 && cpu > 0.0 {
            self.both()
        } else {
            self.alone()
        }
    }

    /// What the CPU's hand-overs take in one token.
    fn sync_ms(&self) -> f64 {
        amount(self.t_sync_ms) * amount(self.layers)
    }

    /// What a tail costs in one token however large it is, where the CPU attends `cpu` bytes of it and `streamed` are copied.
    fn fixed_ms(&self, streamed: f64, cpu: f64) -> f64 {
        let share = if cpu > 0.0 {
            amount(self.share_ms)
        } else {
            0.0
        };
        if streamed + cpu > 0.0 {
            (amount(self.layer_ms) + share) * amount(self.layers) + self.batches_ms(streamed)
        } else {
            0.0
        }
    }

    /// What the batches take that so much is copied in.
    fn batches_ms(&self, streamed: f64) -> f64 {
        let half = self.ahead_bytes() / 2.0;
        let batches = if streamed > half {
            amount(self.layers)
        } else {
            amount(self.layers) * part(streamed / half)
        };
        // Endless halves: 0.
        amount(self.batch_ms) * batches
    }

    /// Everything but what grows with the cells.
    fn beside_cells_ms(&self) -> f64 {
        amount(self.t_other_ms) + amount(self.attention_engage_ms)
    }

    /// Bytes that staging slots hold, each layer's anew, over a token.
    fn ahead_bytes(&self) -> f64 {
        // 0 layers times endless staging is nothing.
        amount(amount(self.staging_bytes) * amount(self.layers))
    }

    /// A token's time with `streamed` bytes of the tail copied and `cpu` bytes attended by the CPU.
    pub fn split(&self, streamed: f64, cpu: f64) -> Split {
        let (streamed, cpu) = (amount(streamed), amount(cpu));
        let rates = self.rates(streamed, cpu);
        let copies = ms(amount(self.copied_bytes) + streamed, rates.link);
        let on_device = amount(self.kv_bytes) - cpu;
        let window = ms(on_device, self.attention_gb_s);
        let rest = self.rest_ms(streamed, rates.link);
        let host = if cpu > 0.0 {
            ms(cpu, rates.cpu) + self.sync_ms()
        } else {
            0.0
        };
        let fixed = self.fixed_ms(streamed, cpu);
        let compute = self.beside_cells_ms() + fixed + window.max(host);
        Split {
            streamed_bytes: streamed,
            cpu_bytes: cpu,
            t_ms: (copies + rest).max(compute),
            link_binds: copies + rest > compute,
        }
    }

    /// How long the link rests in a token that streams so much.
    fn rest_ms(&self, streamed: f64, link_gb_s: f64) -> f64 {
        let slots = self.ahead_bytes();
        if streamed <= slots * AT_ONCE {
            0.0
        } else {
            amount(amount(self.t_other_ms) - ms(slots / 2.0, link_gb_s))
        }
    }

    /// The split of a tail that makes a token fastest; the one with least work for the CPU among equals.
    pub fn best_split(&self, tail_bytes: f64) -> Split {
        let tail = amount(tail_bytes).min(amount(self.kv_bytes));
        let mut best = self.split(tail, 0.0);
        let mut consider = |cpu: f64| {
            // NaN (endless rates against each other) is no candidate.
            if cpu > 0.0 {
                let cpu = cpu.min(tail);
                let split = self.split(tail - cpu, cpu);
                if split.t_ms < best.t_ms {
                    best = split;
                }
            }
        };
        consider(tail);
        // Otherwise the best is where a line that falls as the CPU takes more meets the one that rises: the CPU's own.
        let Rates { link, cpu } = self.both();
        let (link, cpu) = (link * 1e6, cpu * 1e6);
        let device = amount(self.attention_gb_s) * 1e6;
        let other = self.beside_cells_ms() + self.fixed_ms(0.0, 1.0);
        let sync = self.sync_ms();
        let copied = amount(self.copied_bytes) + tail;
        // (copied - C) / link = other + sync + C / cpu
        consider((copied / link - other - sync) / (1.0 / link + 1.0 / cpu));
        // The same, where the link rests.
        let rest = self.rest_ms(f64::INFINITY, self.both().link);
        consider((copied / link + rest - other - sync) / (1.0 / link + 1.0 / cpu));
        // As much as leaves what the slots hold, whatever is lost to rounding.
        consider((tail - self.ahead_bytes() * AT_ONCE) * (1.0 + 1e-9));
        // (kv - C) / device = sync + C / cpu
        let window = amount(self.kv_bytes) / device;
        consider((window - sync) / (1.0 / device + 1.0 / cpu));
        best
    }

    /// The share of tokens a second that a tail costs, against everything resident; 0 if it costs nothing.
    pub fn drop(&self, tail_bytes: f64) -> f64 {
        let resident = self.t_resident_ms();
        let slow_down = self.best_split(tail_bytes).t_ms / resident - 1.0;
        drop_of_slow_down(amount(slow_down))
    }

    /// `T*`: the largest tail with `t <= t_resident / (1 - target)`, at most all KV of the layers that can have one.
    ///
    /// In that time the link carries what it can, and the CPU attends over what it can beside the other layers' work; the
    /// device has less to attend over then than with everything resident, so it never binds.
    pub fn t_star_bytes(&self, target: f64) -> f64 {
        let resident = self.t_resident_ms();
        let limit = resident / (1.0 - part(target));
        let left = limit - self.beside_cells_ms();
        // What any tail costs must be allowed.
        let allowed = |fixed_ms: f64| fixed_ms <= limit - resident;
        let (fixed, fixed_shared) = (self.fixed_ms(1.0, 0.0), self.fixed_ms(0.0, 1.0));
        let streamed = |rates: Rates| {
            let until = |ms: f64| amount(bytes(ms, rates.link) - amount(self.copied_bytes));
            let (slots, rest) = (self.ahead_bytes(), self.rest_ms(f64::INFINITY, rates.link));
            if allowed(fixed) {
                until(limit).min(slots * AT_ONCE).max(until(limit - rest))
            } else {
                0.0
            }
        };
        let attended = |rates: Rates| {
            if allowed(fixed_shared) {
                bytes(left - fixed_shared - self.sync_ms(), rates.cpu)
            } else {
                0.0
            }
        };
        let alone = if amount(self.copied_bytes) > 0.0 {
            0.0
        } else {
            attended(self.alone())
        };
        // What else is copied must be in time beside the CPU too.
        let in_time = bytes(limit, self.both().link) >= amount(self.copied_bytes);
        let both = if in_time {
            streamed(self.both()) + attended(self.both())
        } else {
            0.0
        };
        let most = streamed(self.alone()).max(alone).max(both);
        amount(most).min(amount(self.kv_bytes))
    }
}
