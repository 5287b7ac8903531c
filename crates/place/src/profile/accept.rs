//! A new measurement against the one in hand: noise changes nothing.
//!
//! A tier changes tokens, so it must stay the same from run to run on one machine. It does if the profile does.

use std::collections::HashMap;

use super::{Figure, Profile, Unit};

/// One figure that the new measurement changed.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// Its path, as in [`Profile::figures`].
    pub path: String,
    /// Its unit.
    pub unit: Unit,
    /// What was in hand; `None` if it was not measured before.
    pub old: Option<Figure>,
    /// What was measured.
    pub new: Figure,
}

/// The profile to keep, and what in it is new.
#[derive(Clone, Debug, PartialEq)]
pub struct Accepted {
    /// The profile to keep.
    pub profile: Profile,
    /// Figures that differ from the old profile's.
    pub changes: Vec<Change>,
}

impl Profile {
    /// Takes from `new` what differs by more than twice the spread, and what `self` lacks; all other figures stay as they
    /// are. With another key, or another source, `new` replaces everything. Free and available bytes are always the new ones.
    pub fn accept(&self, new: &Self) -> Accepted {
        let mut profile = new.clone();
        let same_machine = self.key == new.key && self.source == new.source;
        let old: HashMap<String, Figure> = if same_machine {
            let named = self.figures().into_iter();
            named.map(|(path, figure, _)| (path, figure)).collect()
        } else {
            HashMap::new()
        };
        let mut changes = Vec::new();
        profile.visit_mut(&mut |path, figure, unit| match old.get(path) {
            Some(old) if !old.differs(figure) => *figure = *old,
            old => changes.push(Change {
                path: path.to_owned(),
                unit,
                old: old.copied(),
                new: *figure,
            }),
        });
        Accepted { profile, changes }
    }
}
