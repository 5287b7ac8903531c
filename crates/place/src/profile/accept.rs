//! A new measurement against the one in hand: noise changes nothing.
//!
//! A tier changes tokens, so it must stay the same from run to run on one machine. It does if the profile does.

use std::cmp::Ordering;
use std::collections::{HashMap, HashSet};

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
    /// are. A figure that was measured undisturbed is not replaced by one that was disturbed or guessed, but replaces one that was; nor does a
    /// guess replace what was disturbed.
    /// With another key, or another source, `new` replaces everything. Free and available bytes are always the new ones.
    pub fn accept(&self, new: &Self) -> Accepted {
        let mut profile = new.clone();
        let same_machine = self.key == new.key && self.source == new.source;
        let old: HashMap<String, Figure> = if same_machine {
            let named = self.figures().into_iter();
            named.map(|(path, figure, _)| (path, figure)).collect()
        } else {
            HashMap::new()
        };
        // What could not be seen this time is as it was.
        if same_machine {
            let (host, old) = (&mut profile.host, &self.host);
            host.stage_gb_s = host.stage_gb_s.or(old.stage_gb_s);
            host.disk_read_gb_s = host.disk_read_gb_s.or(old.disk_read_gb_s);
        }
        let (old_doubts, new_doubts) = (self.doubts(), new.doubts());
        let mut changes = Vec::new();
        let mut kept = HashSet::new();
        profile.visit_mut(&mut |path, figure, unit| {
            let found = old.get(path).copied();
            let is_kept =
                found.is_some_and(|old| match old_doubts.of(path).cmp(&new_doubts.of(path)) {
                    Ordering::Less => true,
                    Ordering::Greater => false,
                    Ordering::Equal => !old.differs(figure),
                });
            match found.filter(|_| is_kept) {
                Some(old) => {
                    *figure = old;
                    kept.insert(path.to_owned());
                }
                None => changes.push(Change {
                    path: path.to_owned(),
                    unit,
                    old: found,
                    new: *figure,
                }),
            }
        });
        // A figure that stayed is as good as it was.
        let merged = |old: &[String], new: &[String]| {
            let stayed = old.iter().filter(|path| kept.contains(*path));
            let came = new.iter().filter(|path| !kept.contains(*path));
            stayed.chain(came).cloned().collect()
        };
        profile.disturbed = merged(&self.disturbed, &new.disturbed);
        profile.guessed = merged(&self.guessed, &new.guessed);
        Accepted { profile, changes }
    }

    fn doubts(&self) -> Doubts<'_> {
        Doubts {
            disturbed: self.disturbed.iter().map(String::as_str).collect(),
            guessed: self.guessed.iter().map(String::as_str).collect(),
        }
    }
}

/// How much figures are to be doubted.
struct Doubts<'p> {
    disturbed: HashSet<&'p str>,
    guessed: HashSet<&'p str>,
}

impl Doubts<'_> {
    /// None, disturbed, guessed.
    fn of(&self, path: &str) -> u8 {
        if self.guessed.contains(path) {
            2
        } else {
            u8::from(self.disturbed.contains(path))
        }
    }
}
