//! Profiles that ship: a default, and examples of kinds of machines.

use super::Profile;
use crate::error::Error;

/// Name and text.
type BuiltIn = (&'static str, &'static str);

macro_rules! built_in {
    ($($name:literal),* $(,)?) => {
        [$(($name, include_str!(concat!("../../profiles/", $name, ".json")))),*]
    };
}

const DEFAULT: BuiltIn = built_in!["default"][0];

static EXAMPLES: [BuiltIn; 12] = built_in![
    "8gb-pcie3-ddr4",
    "8gb-pcie4x8-ddr4",
    "12gb-pcie4-ddr4",
    "16gb-pcie4-ddr5",
    "16gb-pcie5-ddr5",
    "24gb-pcie3-ddr4",
    "24gb-pcie4-ddr5",
    "32gb-pcie5-ddr5",
    "h200-pcie5",
    "published-pcie6.7-ram11.5",
    "published-pcie51.2-ram9.3",
    "cpu-16-cores",
];

fn parse((name, text): BuiltIn) -> Profile {
    Profile::from_json(text).unwrap_or_else(|e| panic!("built-in profile {name}, tested: {e}"))
}

/// The guess for a machine that was not measured: a processor of four cores without an accelerator.
pub fn default_profile() -> Profile {
    parse(DEFAULT)
}

/// Names of the examples.
pub fn example_names() -> Vec<&'static str> {
    EXAMPLES.iter().map(|(name, _)| *name).collect()
}

/// An example by its name; `default` too.
///
/// # Errors
/// If there is none of that name; the error lists those that there are.
pub fn example(name: &str) -> Result<Profile, Error> {
    let mut all = EXAMPLES.iter().copied().chain([DEFAULT]);
    let found = all.find(|(n, _)| *n == name);
    found.map(parse).ok_or_else(|| Error::ProfileName {
        found: name.to_owned(),
        known: example_names(),
    })
}
