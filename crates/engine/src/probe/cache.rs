//! Profiles on disk: a file for each key, replaced as a whole.

use super::{Error, Progress};
use place::limits::PROFILE_TEXT_BYTES_MAX;
use place::profile::{Key, Profile, Source};
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

/// The folder of cached profiles: `probe` in `$SPILLGATE_CACHE`, or in `spillgate` in the platform's cache folder.
///
/// # Errors
/// If the platform has no such folder.
pub fn dir() -> Result<PathBuf, Error> {
    let folder = match std::env::var_os("SPILLGATE_CACHE") {
        Some(dir) if !dir.is_empty() => PathBuf::from(dir),
        _ => dirs::cache_dir()
            .ok_or(Error::NoCacheDir)?
            .join("spillgate"),
    };
    Ok(folder.join("probe"))
}

/// Where the profile of a key lies.
pub(super) fn path(dir: &Path, key: &Key) -> PathBuf {
    let text = serde_json::to_string(key).expect("a key is texts and numbers");
    let digest = Sha256::digest(text.as_bytes());
    let name: String = digest.iter().take(8).map(|b| format!("{b:02x}")).collect();
    dir.join(format!("{name}.json"))
}

/// The cached profile of a key. One that cannot be used is told of, and counts as none.
pub(super) fn load(dir: &Path, key: &Key, progress: &mut dyn Progress) -> Option<Profile> {
    let path = path(dir, key);
    match read(&path, key) {
        Ok(profile) => profile,
        Err(problem) => {
            let path = path.display();
            progress.note(&format!("{path} cannot be used ({problem})"));
            None
        }
    }
}

fn read(path: &Path, key: &Key) -> Result<Option<Profile>, String> {
    let file = match File::open(path) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        opened => opened.map_err(|e| e.to_string())?,
    };
    let mut text = String::new();
    file.take(PROFILE_TEXT_BYTES_MAX as u64 + 1)
        .read_to_string(&mut text)
        .map_err(|e| e.to_string())?;
    let profile = Profile::from_json(&text).map_err(|e| e.to_string())?;
    if profile.source != Source::Measured {
        return Err("it was not measured".to_owned());
    }
    if profile.key != *key {
        return Err("it is of another machine".to_owned());
    }
    Ok(Some(profile))
}

/// Keeps a profile under its key.
pub(super) fn store(dir: &Path, profile: &Profile) -> Result<(), Error> {
    fs::create_dir_all(dir).map_err(Error::io("create", dir))?;
    let path = path(dir, &profile.key);
    // Another process may store the same profile at the same time.
    let part = path.with_extension(format!("{}.part", std::process::id()));
    let write = || {
        let mut file = File::create(&part)?;
        file.write_all(profile.to_json().as_bytes())?;
        file.sync_all()?;
        fs::rename(&part, &path)
    };
    write().map_err(|e| {
        // What failed is what counts; a file left behind harms nothing.
        let _ = fs::remove_file(&part);
        Error::io("write", &path)(e)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Notes(Vec<String>);

    impl Progress for Notes {
        fn note(&mut self, text: &str) {
            self.0.push(text.to_owned());
        }
    }

    fn measured() -> Profile {
        let mut profile = place::profile::default_profile();
        profile.source = Source::Measured;
        profile.key.cpu = "a processor".to_owned();
        profile
    }

    #[test]
    fn what_was_stored_is_found_by_its_key_alone() {
        let dir = tempfile::tempdir().unwrap();
        let (folder, profile) = (dir.path().join("new"), measured());
        let mut notes = Notes::default();
        assert_eq!(load(&folder, &profile.key, &mut notes), None);
        store(&folder, &profile).unwrap();
        store(&folder, &profile).unwrap();
        assert_eq!(
            load(&folder, &profile.key, &mut notes),
            Some(profile.clone())
        );
        let mut changes: Vec<Key> = vec![profile.key.clone(); 6];
        changes[0].cpu.push('x');
        changes[1].cores += 1;
        changes[2].threads += 1;
        changes[3].device.push('x');
        changes[4].driver.push('x');
        changes[5].shaped_by.push('x');
        for key in changes {
            assert_eq!(load(&folder, &key, &mut notes), None, "{key:?}");
        }
        assert!(notes.0.is_empty());
        let files: Vec<_> = fs::read_dir(&folder).unwrap().collect();
        assert_eq!(files.len(), 1, "no part is left behind");
    }

    #[test]
    fn a_damaged_file_is_told_of_and_counts_as_none() {
        let dir = tempfile::tempdir().unwrap();
        let profile = measured();
        store(dir.path(), &profile).unwrap();
        let path = path(dir.path(), &profile.key);
        let text = fs::read_to_string(&path).unwrap();
        let mut other = profile.clone();
        other.key.cpu.push('x');
        let mut guess = profile.clone();
        guess.source = Source::Default;
        let mut zero = profile.clone();
        zero.host.read_gb_s.all.value = 0.0;
        let damaged = [
            String::new(),
            text[..text.len() / 2].to_owned(),
            "x".repeat(PROFILE_TEXT_BYTES_MAX + 10),
            other.to_json(),
            guess.to_json(),
            zero.to_json(),
        ];
        for text in damaged {
            fs::write(&path, &text).unwrap();
            let mut notes = Notes::default();
            assert_eq!(load(dir.path(), &profile.key, &mut notes), None);
            assert_eq!(notes.0.len(), 1);
            assert!(notes.0[0].contains("cannot be used"), "{}", notes.0[0]);
        }
        fs::write(&path, [0xff, 0xfe]).unwrap();
        let mut notes = Notes::default();
        assert_eq!(load(dir.path(), &profile.key, &mut notes), None);
        assert_eq!(notes.0.len(), 1);
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_an_error() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let stored = store(&file.path().join("below"), &measured());
        assert!(matches!(stored, Err(Error::Io { .. })));
    }
}
