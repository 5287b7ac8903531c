//! How often experts are used: what is expected of the next tokens by those before.

use crate::error::Error;
use crate::limits::{EXPERTS_MAX, LAYERS_MAX};
use crate::model::{self, Keeps, Model};
use serde::{Deserialize, Serialize};

/// Tokens after which a use counts half, of what is expected for long and of what is going on now. Chosen with recorded and made-up routing
/// (docs/measurements.md).
const HALF_LIFE_TOKENS: f64 = 256.0;
const RECENT_HALF_LIFE_TOKENS: f64 = 4.0;

/// What the recent rate counts beside the other one.
const RECENT_PART: f64 = 0.3;

/// Tokens that are taken to have used all experts alike before the first one came: so the first ones do not decide alone.
const PRIOR_TOKENS: f64 = 16.0;

/// Tokens that a profile of another time counts as.
const RECALLED_TOKENS: f64 = 256.0;

/// Weights of uses grow instead of old ones shrinking; beyond this power of two all are divided by it.
const WEIGHT_MAX_LOG2: f64 = 200.0;

/// A layer with experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layer {
    /// Experts E.
    pub experts: u32,
    /// Experts that a token uses.
    pub used: u32,
    /// Bytes of one expert.
    pub blob_bytes: u64,
}

impl Layer {
    /// Those of a model that decoding runs.
    pub fn of_model(model: &Model) -> Vec<Self> {
        let experts = model.experts.map_or((0, 0), |e| (e.total, e.used));
        let layers = model.layers.iter();
        let has_experts = |l: &&model::Layer| l.keeps != Keeps::Unused && l.expert_bytes > 0;
        let narrow = |n: u64| u32::try_from(n).unwrap_or(u32::MAX).min(EXPERTS_MAX);
        let layer = |l: &model::Layer| Self {
            experts: narrow(experts.0),
            used: narrow(experts.1),
            blob_bytes: l.one_expert_bytes,
        };
        layers.filter(has_experts).map(layer).collect()
    }
}

/// The number of an expert among those of all layers, layer by layer.
pub(super) type Blob = usize;

/// What of a model's experts tokens use, as it is kept for another time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// [`Profile::VERSION`].
    pub version: u32,
    /// Tokens that it was learnt from.
    pub tokens: u64,
    /// The part of tokens that used each expert, layer by layer.
    pub rates: Vec<Vec<f32>>,
}

impl Profile {
    /// The version that is written and read.
    pub const VERSION: u32 = 1;

    /// Refuses what is not of these layers.
    ///
    /// # Errors
    /// If it is of other layers, or has rates that cannot be.
    pub fn check(&self, layers: &[Layer]) -> Result<(), Error> {
        let same = self.version == Self::VERSION
            && self.rates.len() == layers.len()
            && self
                .rates
                .iter()
                .zip(layers)
                .all(|(rates, layer)| rates.len() == layer.experts as usize);
        let sound = self
            .rates
            .iter()
            .flatten()
            .all(|rate| (0.0..=1.0).contains(rate));
        if same && sound {
            return Ok(());
        }
        Err(Error::Profile {
            field: "experts".to_owned(),
            problem: if same {
                "has rates beyond 0 to 1".to_owned()
            } else {
                format!("is not of {} layers with these experts", layers.len())
            },
        })
    }
}

/// Uses of experts and tokens of layers, new ones weighing more than old ones.
#[derive(Clone, Debug)]
struct Sums {
    half_life: f64,
    uses: Vec<f64>,
    totals: Vec<f64>,
    /// What a use weighs now, as a power of two.
    weight_log2: f64,
}

impl Sums {
    fn begin(&mut self, tokens: u32) {
        self.weight_log2 += f64::from(tokens) / self.half_life;
        if self.weight_log2 > WEIGHT_MAX_LOG2 {
            // What is far beyond numbers is forgotten.
            let factor = (-self.weight_log2).exp2();
            let sums = self.uses.iter_mut().chain(&mut self.totals);
            sums.for_each(|sum| *sum *= factor);
            self.weight_log2 = 0.0;
        }
    }

    fn observe(&mut self, layer: usize, first: usize, tokens: u32, used: &[(u32, u32)]) {
        let weight = self.weight_log2.exp2();
        self.totals[layer] += weight * f64::from(tokens);
        for &(expert, n) in used {
            self.uses[first + expert as usize] += weight * f64::from(n);
        }
    }

    /// 0 where all is forgotten.
    fn rate(&self, layer: usize, blob: Blob) -> f64 {
        let rate = self.uses[blob] / self.totals[layer];
        if rate.is_finite() { rate } else { 0.0 }
    }
}

/// Rates of use, learnt from tokens as they come.
#[derive(Clone, Debug)]
pub(super) struct Usage {
    layers: Vec<Layer>,
    /// The first expert of each layer, and the layer of each expert.
    firsts: Vec<usize>,
    layer_of: Vec<u32>,
    long: Sums,
    recent: Sums,
    tokens: u64,
}

impl Usage {
    pub(super) fn new(layers: &[Layer], recalled: Option<&Profile>) -> Self {
        assert!(layers.len() as u64 <= LAYERS_MAX, "a model's layers");
        let mut firsts = Vec::with_capacity(layers.len());
        let mut uses = Vec::new();
        let mut layer_of = Vec::new();
        for (i, layer) in layers.iter().enumerate() {
            assert!(layer.experts <= EXPERTS_MAX, "a layer's experts");
            firsts.push(uses.len());
            layer_of.extend((0..layer.experts).map(|_| i as u32));
            let alike = PRIOR_TOKENS * f64::from(layer.used) / f64::from(layer.experts.max(1));
            uses.extend((0..layer.experts as usize).map(|e| {
                let learnt = recalled.map_or(0.0, |p| f64::from(p.rates[i][e]));
                alike + RECALLED_TOKENS * learnt
            }));
        }
        let total = PRIOR_TOKENS + recalled.map_or(0.0, |_| RECALLED_TOKENS);
        let long = Sums {
            half_life: HALF_LIFE_TOKENS,
            totals: vec![total; layers.len()],
            uses,
            weight_log2: 0.0,
        };
        Self {
            layers: layers.to_vec(),
            firsts,
            layer_of,
            recent: Sums {
                half_life: RECENT_HALF_LIFE_TOKENS,
                ..long.clone()
            },
            long,
            tokens: 0,
        }
    }

    pub(super) fn layers(&self) -> &[Layer] {
        &self.layers
    }

    pub(super) fn blobs(&self) -> usize {
        self.layer_of.len()
    }

    pub(super) fn blob(&self, layer: usize, expert: u32) -> Blob {
        self.firsts[layer] + expert as usize
    }

    /// The layer of an expert, and its id there.
    pub(super) fn place(&self, blob: Blob) -> (usize, u32) {
        let layer = self.layer_of[blob] as usize;
        (layer, (blob - self.firsts[layer]) as u32)
    }

    pub(super) fn bytes(&self, blob: Blob) -> u64 {
        self.layers[self.place(blob).0].blob_bytes
    }

    /// Tells that so many tokens are about to go through all layers.
    pub(super) fn begin(&mut self, tokens: u32) {
        self.tokens += u64::from(tokens);
        self.long.begin(tokens);
        self.recent.begin(tokens);
    }

    /// Tells what they use of one layer.
    pub(super) fn observe(&mut self, layer: usize, tokens: u32, used: &[(u32, u32)]) {
        let first = self.firsts[layer];
        self.long.observe(layer, first, tokens, used);
        self.recent.observe(layer, first, tokens, used);
    }

    /// The part of tokens that is expected to use an expert.
    pub(super) fn rate(&self, blob: Blob) -> f64 {
        self.long.rate(self.layer_of[blob] as usize, blob)
    }

    /// What having an expert is worth, compared with others: what is going on now counts, too.
    pub(super) fn worth(&self, blob: Blob) -> f64 {
        let layer = self.layer_of[blob] as usize;
        self.long.rate(layer, blob) + RECENT_PART * self.recent.rate(layer, blob)
    }

    /// Tokens that rates are of, those long ago counting little.
    pub(super) fn tokens_counted(&self, layer: usize) -> f64 {
        self.long.totals[layer] / self.long.weight_log2.exp2()
    }

    /// What was learnt, for another time.
    pub(super) fn profile(&self) -> Profile {
        let rates = |(i, layer): (usize, &Layer)| {
            let rate = |e| self.rate(self.blob(i, e)).clamp(0.0, 1.0) as f32;
            (0..layer.experts).map(rate).collect()
        };
        Profile {
            version: Profile::VERSION,
            tokens: self.tokens,
            rates: self.layers.iter().enumerate().map(rates).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYERS: [Layer; 2] = [
        Layer {
            experts: 4,
            used: 2,
            blob_bytes: 100,
        },
        Layer {
            experts: 2,
            used: 1,
            blob_bytes: 50,
        },
    ];

    #[test]
    fn rates_are_those_of_the_tokens_that_came_and_recent_ones_count_more() {
        let mut usage = Usage::new(&LAYERS, None);
        assert!((usage.rate(3) - 0.5).abs() < 1e-12);
        for _ in 0..20_000 {
            usage.begin(1);
            usage.observe(0, 1, &[(0, 1), (1, 1)]);
            usage.observe(1, 1, &[(0, 1)]);
        }
        assert!(usage.rate(0) > 0.999 && usage.rate(3) < 1e-3);
        // A chunk of a prompt counts as its tokens do.
        usage.begin(HALF_LIFE_TOKENS as u32);
        usage.observe(0, 256, &[(2, 256), (3, 256)]);
        let (old, new) = (usage.rate(0), usage.rate(3));
        assert!(new > old && old > 0.2, "{old} {new}");
        assert!(usage.rate(4) > 0.999);
        // What is going on now is worth more than what was as often.
        usage.begin(1);
        usage.observe(0, 1, &[(0, 1), (2, 1)]);
        assert!(usage.worth(2) - usage.rate(2) > usage.worth(3) - usage.rate(3));
        assert_eq!(
            (usage.place(0), usage.place(3), usage.place(4)),
            ((0, 0), (0, 3), (1, 0))
        );
        assert_eq!(
            (usage.bytes(3), usage.bytes(4), usage.blobs()),
            (100, 50, 6)
        );
    }

    #[test]
    fn sums_stay_numbers_over_any_number_of_tokens() {
        let mut usage = Usage::new(&LAYERS, None);
        for i in 0..10_000 {
            usage.begin(u32::from(i & 1 == 0) * 16_384 + 1);
            usage.observe(0, 1, &[(i % 4, 1)]);
        }
        assert!((0..4).all(|e| usage.rate(e).is_finite() && usage.worth(e).is_finite()));
        assert!(usage.worth(4).is_finite());
    }

    #[test]
    fn what_was_learnt_is_recalled_for_the_same_layers_alone() {
        let mut usage = Usage::new(&LAYERS, None);
        usage.begin(1000);
        usage.observe(0, 1000, &[(2, 1000)]);
        let profile = usage.profile();
        profile.check(&LAYERS).unwrap();
        let text = serde_json::to_string(&profile).unwrap();
        assert_eq!(serde_json::from_str::<Profile>(&text).unwrap(), profile);
        let again = Usage::new(&LAYERS, Some(&profile));
        assert!(again.rate(2) > 0.9 && again.rate(0) < 0.1);
        assert!(profile.check(&LAYERS[..1]).is_err());
        let mut odd = profile.clone();
        odd.rates[0][0] = f32::NAN;
        assert!(odd.check(&LAYERS).is_err());
        odd.rates[0].pop();
        assert!(odd.check(&LAYERS).is_err());
    }
}
