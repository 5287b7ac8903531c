//! Pairs of K and V types, and which of them a decision may choose from.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::bytes::{KvType, check_types};
use crate::error::Error;
use crate::model::Model;

/// How K and V are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Tier {
    /// Type of K.
    pub type_k: KvType,
    /// Type of V.
    pub type_v: KvType,
}

/// The ladder, least compressing first. K is never stored in fewer bits than V: attention is more sensitive to it.
pub const LADDER: [Tier; 4] = [
    Tier::new(KvType::F16, KvType::F16),
    Tier::new(KvType::Q8_0, KvType::Q8_0),
    Tier::new(KvType::Q8_0, KvType::Q4_0),
    Tier::new(KvType::Q4_0, KvType::Q4_0),
];

/// What V walks where K is pinned.
const V_WALK: [KvType; 3] = [KvType::F16, KvType::Q8_0, KvType::Q4_0];

impl Tier {
    /// A pair.
    pub const fn new(type_k: KvType, type_v: KvType) -> Self {
        Self { type_k, type_v }
    }

    /// Whether K or V has fewer bits than in `floor`.
    pub fn is_below(self, floor: Self) -> bool {
        self.type_k.bits() < floor.type_k.bits() || self.type_v.bits() < floor.type_v.bits()
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{}/{}", self.type_k, self.type_v))
    }
}

/// The tiers to choose from, least compressing first, never empty. What is pinned is kept: with V given there is one tier (K
/// is f16 unless given), with K alone V walks f16, q8_0, q4_0. Tiers whose blocks do not divide the model's heads are left out.
///
/// # Errors
/// [`Error::KvBlock`] if that is so for a pinned type.
pub fn allowed(
    model: &Model,
    type_k: Option<KvType>,
    type_v: Option<KvType>,
) -> Result<Vec<Tier>, Error> {
    let asked: Vec<Tier> = match (type_k, type_v) {
        (None, None) => LADDER.to_vec(),
        (Some(k), None) => V_WALK.map(|v| Tier::new(k, v)).to_vec(),
        (k, Some(v)) => vec![Tier::new(k.unwrap_or(KvType::F16), v)],
    };
    // The first one has what is pinned and f16, which fits every head.
    let first = asked[0];
    check_types(model, first.type_k, first.type_v)?;
    let fits = |t: &Tier| check_types(model, t.type_k, t.type_v).is_ok();
    Ok(asked.into_iter().filter(fits).collect())
}
