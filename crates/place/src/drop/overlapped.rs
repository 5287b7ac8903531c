//! The overlapped model: copies of the tail run ahead of use, and the CPU attends over part of it where it lies.
//!
//! ```text
//! t = max( copies + rest,  T_other + engage + batches + max( (KV - C) / device attention + L * t_share + lost,  C / cpu + L * t_sync ) )
//! copies = (O + D) / link + (1 - link kept) * (C / cpu), at most (O + D) / (link kept * link)
//! lost = (1 - device kept) * copies
//! D + C = tail
//! rest = 0 if D <= L * staging * 3/4, else max(0, T_other - L * staging / 2 / link)
//! ```
//!
//! D bytes are streamed and C bytes attended by the CPU, whole groups of blocks in each layer: layers have as many as the mean or one more, and are alike
//! otherwise. What is left of the device's attention at no cells comes before the CPU is given its part, and after it has answered. The copies are a timeline of their own (O: what else they carry), which runs ahead as far as the staging slots reach. Where
//! these hold what a layer streams, and some more, it is attended at once, copies go on meanwhile, and the link never rests. Where they do
//! not, a layer is attended by halves of the slots, and the other half is all that is copied while the rest of the model works. While both
//! run, link and CPU keep only a part of their rates, because they share the host's memory: the CPU all the time that it attends, the link only that
//! long. And the device reads its own memory slower while copies
//! are written there.

use super::{BYTES_MS, amount, bytes, drop_of_slow_down, ms, part};

/// The part of the staging slots that one layer may fill and still be attended at once.
const AT_ONCE: f64 = 0.75;

/// The part of the slots that is filled anew at a time, without and with a share of the CPU.
const BATCH: [f64; 2] = [0.5, 0.25];

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
    /// Part of its rate that the device keeps meanwhile.
    pub device_kept: f64,
    /// Handing one layer's work to the CPU and back, beside the device's attention at no cells, and what the CPU's takes at none.
    pub t_sync_ms: f64,
    /// Layers that can have a tail.
    pub layers: f64,
    /// Everything but the attention of those layers.
    pub t_other_ms: f64,
    /// The device's attention of those layers at no cells.
    pub attention_engage_ms: f64,
    /// The same over few cells: it takes no less.
    pub attention_least_ms: f64,
    /// The device's attention in bytes of KV.
    pub attention_gb_s: f64,
    /// KV of those layers, tail included.
    pub kv_bytes: f64,
    /// Copied in each token beside the tail: O.
    pub copied_bytes: f64,
    /// Staging slots for the tail.
    pub staging_bytes: f64,
    /// What each of those layers takes more on the device if the CPU has a share.
    pub share_ms: f64,
    /// What a batch of copies takes of the device: it begins when so many of the slots can be filled anew, at the earliest once a layer.
    pub batch_ms: f64,
    /// KV of a group, over all layers: of these the CPU attends whole ones in each layer. 0: any amount.
    pub group_bytes: f64,
    /// A share must save this part of a token, or there is none: what a prediction is sure of.
    pub least_gain: f64,
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

impl Overlapped {
    /// Everything resident.
    pub fn t_resident_ms(&self) -> f64 {
        let copied = ms(self.copied_bytes, self.link_gb_s);
        let attention = amount(self.attention_engage_ms) + self.window_ms(amount(self.kv_bytes));
        copied.max(amount(self.t_other_ms) + attention)
    }

    /// CPU attention beside copies, or alone: what does not run takes nothing from the other.
    fn cpu_rate(&self, beside_copies: bool) -> f64 {
        let kept = if beside_copies {
            part(self.cpu_kept)
        } else {
            1.0
        };
        amount(self.cpu_gb_s) * kept
    }

    /// What copies take of which the CPU attends for a part of the time.
    pub(super) fn copies_ms(&self, copied: f64, cpu_ms: f64) -> f64 {
        let (alone, kept) = (ms(copied, self.link_gb_s), part(self.link_kept));
        let beside = (1.0 - kept) * amount(cpu_ms);
        // Not more than if it attended all the time.
        (alone + beside).min(amount(alone / kept))
    }

    /// The part of the time of copies that the device loses by them.
    fn lost(&self) -> f64 {
        1.0 - part(self.device_kept)
    }

    /// The device's attention over so much KV, beside what it takes at no cells.
    fn window_ms(&self, bytes: f64) -> f64 {
        let beside = amount(self.attention_least_ms) - amount(self.attention_engage_ms);
        ms(bytes, self.attention_gb_s).max(beside)
    }

    /// What the CPU's hand-overs take in one token.
    fn sync_ms(&self) -> f64 {
        amount(self.t_sync_ms) * amount(self.layers)
    }

    /// What the CPU's share costs the device in one token.
    fn share_ms(&self) -> f64 {
        amount(self.share_ms) * amount(self.layers)
    }

    /// What the batches take that so much is copied in; one more begins with a token.
    fn batches_ms(&self, streamed: f64, shares: bool) -> f64 {
        let batch = self.ahead_bytes() * BATCH[usize::from(shares)];
        let part = if streamed > batch {
            1.0
        } else {
            part(streamed / batch)
        };
        // Endless slots: one.
        let batches = amount(self.layers) * part + f64::from(u8::from(streamed > 0.0));
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
        let copied = amount(self.copied_bytes) + streamed;
        let shares = cpu > 0.0;
        let cpu_gb_s = self.cpu_rate(shares && copied > 0.0);
        let copies = self.copies_ms(copied, ms(cpu, cpu_gb_s));
        let rest = self.rest_ms(streamed);
        // Of layers that are all like one with so much for the CPU, over all of them.
        let attention = |cpu: f64| {
            let window = self.window_ms(amount(self.kv_bytes) - cpu) + self.lost() * copies;
            if cpu > 0.0 {
                (window + self.share_ms()).max(ms(cpu, cpu_gb_s) + self.sync_ms())
            } else {
                window
            }
        };
        let group = amount(self.group_bytes);
        let attention = if group > 0.0 && group.is_finite() {
            let groups = cpu / group;
            let whole = whole(groups);
            let more = part(groups - whole);
            let with_more = if more > 0.0 {
                more * attention((whole + 1.0) * group)
            } else {
                0.0
            };
            (1.0 - more) * attention(whole * group) + with_more
        } else {
            attention(cpu)
        };
        let compute = self.beside_cells_ms() + self.batches_ms(streamed, shares) + attention;
        let copies = copies + rest;
        Split {
            streamed_bytes: streamed,
            cpu_bytes: cpu,
            t_ms: compute.max(copies),
            link_binds: copies > compute,
        }
    }

    /// A token's time if the CPU attends a share of the tail.
    pub fn shared(&self, tail_bytes: f64, share: f64) -> Split {
        let cpu = (tail_bytes * share).min(self.most_by_cpu(tail_bytes));
        self.split(tail_bytes - cpu, cpu)
    }

    /// What of a tail the CPU can attend: whole groups.
    fn most_by_cpu(&self, tail: f64) -> f64 {
        let group = amount(self.group_bytes);
        if group > 0.0 {
            amount(whole(tail / group) * group).min(tail)
        } else {
            tail
        }
    }

    /// How long the link rests in a token that streams so much.
    fn rest_ms(&self, streamed: f64) -> f64 {
        let slots = self.ahead_bytes();
        if streamed <= slots * AT_ONCE {
            0.0
        } else {
            amount(amount(self.t_other_ms) - ms(slots / 2.0, self.link_gb_s))
        }
    }

    /// The split of a tail that makes a token fastest; the one with least work for the CPU among equals, and none if that is nearly as fast.
    pub fn best_split(&self, tail_bytes: f64) -> Split {
        let tail = amount(tail_bytes).min(amount(self.kv_bytes));
        let none = self.split(tail, 0.0);
        let mut best = none;
        let (most, group) = (self.most_by_cpu(tail), amount(self.group_bytes));
        let mut consider_one = |cpu: f64| {
            // NaN (endless rates against each other) is no candidate.
            if cpu > 0.0 && most > 0.0 {
                let cpu = cpu.min(most);
                let split = self.split(tail - cpu, cpu);
                if split.t_ms < best.t_ms {
                    best = split;
                }
            }
        };
        let mut consider = |cpu: f64| {
            consider_one(cpu);
            // As many groups in each layer.
            if group > 0.0 {
                let groups = whole(cpu / group);
                consider_one(groups * group);
                consider_one((groups + 1.0) * group);
            }
        };
        consider(tail);
        // Otherwise the best is where a line that falls as the CPU takes more meets one that rises: the CPU's, or the copies' if the CPU takes more from them
        // than it spares them. Lines: milliseconds at no bytes, and a byte more.
        let each = |gb_s: f64| 1.0 / (gb_s * 1e6);
        let (link, device) = (
            each(amount(self.link_gb_s)),
            each(amount(self.attention_gb_s)),
        );
        let copied = amount(self.copied_bytes) + tail;
        let beside = self.beside_cells_ms();
        let host = (beside + self.sync_ms(), each(self.cpu_rate(true)));
        let copies = (copied * link, (1.0 - part(self.link_kept)) * host.1 - link);
        // The same, where the CPU attends all the time, and where the link rests.
        let kept = part(self.link_kept);
        let beside_all = (copies.0 / kept, -link / kept);
        let rest = self.rest_ms(f64::INFINITY);
        let resting = [copies, beside_all].map(|line| (line.0 + rest, line.1));
        let window = (
            beside + self.share_ms() + amount(self.kv_bytes) * device + self.lost() * copied * link,
            -device - self.lost() * link,
        );
        let lines = [copies, beside_all, resting[0], resting[1], window, host];
        for (i, one) in lines.iter().enumerate() {
            for other in &lines[i + 1..] {
                consider((one.0 - other.0) / (other.1 - one.1));
            }
        }
        // As much as leaves what the slots hold, whatever is lost to rounding.
        consider((tail - self.ahead_bytes() * AT_ONCE) * (1.0 + 1e-9));
        if best.t_ms < none.t_ms * (1.0 - amount(self.least_gain)) {
            best
        } else {
            none
        }
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
    /// device has less to attend over then than with everything resident, so it does not bind but by what any tail costs.
    pub fn t_star_bytes(&self, target: f64) -> f64 {
        let resident = self.t_resident_ms();
        let all = resident / (1.0 - part(target));
        let copied = amount(self.copied_bytes);
        // What a tail costs the device must be allowed.
        let allowed_ms = all - resident;
        // How long the CPU can attend.
        let cpu_ms = if self.share_ms() <= allowed_ms {
            amount(all - self.beside_cells_ms() - self.sync_ms())
        } else {
            0.0
        };
        let (slots, rest) = (self.ahead_bytes() * AT_ONCE, self.rest_ms(f64::INFINITY));
        let taken = 1.0 - part(self.link_kept);
        let each = 1.0 / (amount(self.link_gb_s) * BYTES_MS);
        // How long copies may take that the device loses something by.
        let lost_ms = |fixed: f64| {
            if self.lost() > 0.0 {
                (allowed_ms - fixed) / self.lost()
            } else {
                f64::INFINITY
            }
        };
        // What is streamed while the CPU attends for so long.
        let streamed = |shares: bool, cpu_ms: f64| {
            let share = if shares { self.share_ms() } else { 0.0 };
            let fixed = share + self.batches_ms(1.0, shares);
            if fixed > allowed_ms {
                return 0.0;
            }
            let until = |ms: f64| amount(bytes(ms - taken * cpu_ms, self.link_gb_s) - copied);
            let most = until(all).min(slots).max(until(all - rest));
            most.min(until(lost_ms(fixed)))
        };
        let alone = if copied > 0.0 {
            0.0
        } else {
            bytes(cpu_ms, self.cpu_rate(false))
        };
        // What else is copied must be in time beside the CPU too.
        let in_time = (all - copied * each) / taken;
        let most = cpu_ms.min(amount(in_time));
        // Both: the CPU takes something from the link. The best is that it attends as long as it can, or until the link carries just what slots hold.
        let fixed = self.share_ms() + self.batches_ms(1.0, true);
        let full = (slots + copied) * each;
        let both = [all, lost_ms(fixed)]
            .map(|until| amount((until - full) / taken).min(most))
            .into_iter()
            .chain([most])
            .map(|ms| streamed(true, ms) + bytes(ms, self.cpu_rate(true)))
            .fold(0.0, f64::max);
        let most = streamed(false, 0.0).max(alone).max(both);
        amount(most).min(amount(self.kv_bytes))
    }
}

/// Whole ones, but for what rounding makes of them.
fn whole(n: f64) -> f64 {
    amount((n * (1.0 + 1e-9)).floor())
}
