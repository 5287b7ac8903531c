//! The machine that a plan is for: this one, an example, or one that somebody wrote down; and terms that are set by hand.

use std::env;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result};
use place::limits::PROFILE_TEXT_BYTES_MAX;
use place::profile::{OVERRIDES, Profile, default_profile, example, example_names};
use serde::Serialize;

use crate::failure::Advised;
use crate::output::{human_bytes, table};

/// What `--profile` takes to have the examples listed.
pub const LIST: &str = "list";

/// Variables that set terms begin so; the rest is the term's name in capitals.
const VARIABLE_PREFIX: &str = "SPILLGATE_";

/// An example by its name, or a file.
pub fn named(name: &str) -> Result<Profile> {
    let path = Path::new(name);
    let is_name = name == default_profile().name || example_names().contains(&name);
    if is_name || !path.exists() {
        return example(name).map_err(|error| {
            let hint = "--profile takes one of these names, or the path of a file ('spillgate probe --json' writes one)";
            Advised::new(format!("there is no file {name}, and {error}"), hint).into()
        });
    }
    let mut text = String::new();
    File::open(path)
        // One byte more than there may be, so that a longer text is seen to be one.
        .and_then(|file| {
            file.take(PROFILE_TEXT_BYTES_MAX as u64 + 1)
                .read_to_string(&mut text)
        })
        .with_context(|| format!("cannot read {name}"))?;
    Profile::from_json(&text).with_context(|| format!("cannot use {name}"))
}

/// Sets terms from `SPILLGATE_*` variables.
pub fn apply_variables(profile: &mut Profile) -> Result<()> {
    for term in OVERRIDES {
        let variable = format!("{VARIABLE_PREFIX}{}", term.name.to_uppercase());
        // A variable that is set to nothing is not set.
        let Some(value) = env::var_os(&variable).filter(|v| !v.is_empty()) else {
            continue;
        };
        let value = value.to_string_lossy();
        let number = number(&value).with_context(|| format!("variable {variable}"))?;
        profile
            .set(term.name, number)
            .with_context(|| format!("variable {variable}"))?;
    }
    Ok(())
}

/// Sets terms from `NAME=VALUE`.
pub fn apply_flags(profile: &mut Profile, set: &[String]) -> Result<()> {
    for text in set {
        let Some((name, value)) = text.split_once('=') else {
            let hint =
                "for example --set link_gb_s=6.7; 'spillgate plan --profile list' lists the names";
            return Err(Advised::new(format!("--set {text} is not NAME=VALUE"), hint).into());
        };
        let number = number(value).with_context(|| format!("--set {text}"))?;
        profile
            .set(name, number)
            .with_context(|| format!("--set {text}"))?;
    }
    Ok(())
}

fn number(text: &str) -> Result<f64> {
    text.trim()
        .parse()
        .with_context(|| format!("{text:?} is no number"))
}

/// The examples that ship, and the terms that can be set.
#[derive(Serialize)]
pub struct Listing {
    profiles: Vec<Listed>,
    terms: Vec<Term>,
}

#[derive(Serialize)]
struct Listed {
    name: String,
    host: String,
    host_bytes: u64,
    device: String,
    device_bytes: Option<u64>,
}

#[derive(Serialize)]
struct Term {
    name: &'static str,
    variable: String,
    about: &'static str,
}

impl Listing {
    pub fn new() -> Self {
        let examples = example_names()
            .into_iter()
            .filter_map(|name| example(name).ok());
        let profiles = [default_profile()].into_iter().chain(examples);
        Self {
            profiles: profiles
                .map(|p| Listed {
                    host_bytes: p.host.memory_total_bytes,
                    device_bytes: p.device.as_ref().map(|d| d.total_bytes),
                    host: p.key.cpu,
                    device: p.key.device,
                    name: p.name,
                })
                .collect(),
            terms: OVERRIDES
                .iter()
                .map(|term| Term {
                    name: term.name,
                    variable: format!("{VARIABLE_PREFIX}{}", term.name.to_uppercase()),
                    about: term.about,
                })
                .collect(),
        }
    }

    pub fn text(&self) -> String {
        let head = |cells: &[&str]| cells.iter().map(|c| (*c).to_owned()).collect::<Vec<_>>();
        let mut rows = vec![head(&["PROFILE", "HOST", "MEMORY", "DEVICE", "ITS MEMORY"])];
        rows.extend(self.profiles.iter().map(|p| {
            let device_bytes = p.device_bytes.map_or(String::new(), human_bytes);
            let host_bytes = human_bytes(p.host_bytes);
            head(&[&p.name, &p.host, &host_bytes, &p.device, &device_bytes])
        }));
        let mut text = table(&rows, &[2, 4]);
        let mut rows = vec![head(&["TERM OF --set", "VARIABLE", "WHAT IT IS"])];
        let terms = self.terms.iter();
        rows.extend(terms.map(|t| head(&[t.name, &t.variable, t.about])));
        text.push('\n');
        text += &table(&rows, &[]);
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_set_terms_and_say_which_one_is_wrong() {
        let mut profile = default_profile();
        let set = |profile: &mut Profile, text: &str| apply_flags(profile, &[text.to_owned()]);
        set(&mut profile, "host_read_gb_s=12.5").unwrap();
        assert_eq!(profile.host.read_gb_s.all.value, 12.5);
        for bad in [
            "host_read_gb_s",
            "host_read_gb_s=",
            "host_read_gb_s=x",
            "host_read_gb_s=NaN",
            "host_read_gb_s=0",
            "host_read_gb_s=-1",
            "host_read_gb_s=inf",
            "host_read_gb_s=1e300",
            "no_such_term=1",
            "link_gb_s=6",
            "memory_available_mib=0",
            "memory_available_mib=1e30",
        ] {
            let before = profile.clone();
            let error = format!("{:#}", set(&mut profile, bad).unwrap_err());
            let name = bad.split('=').next().unwrap_or_default();
            assert!(error.contains(name), "{bad}: {error}");
            assert_eq!(profile, before, "{bad}");
        }
    }

    #[test]
    fn every_example_is_listed_and_found() {
        let listing = Listing::new();
        assert!(listing.profiles.len() > 10);
        let text = listing.text();
        for p in &listing.profiles {
            assert_eq!(named(&p.name).unwrap().name, p.name);
            assert!(text.contains(&p.name));
        }
        assert!(text.contains("SPILLGATE_LINK_GB_S"));
    }
}
