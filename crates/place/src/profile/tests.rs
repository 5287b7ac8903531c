use super::*;

fn measured() -> Profile {
    let mut profile = example("h200-pcie5").unwrap();
    profile.source = Source::Measured;
    profile.visit_mut(&mut |_, figure, _| figure.spread = figure.value * 0.02);
    profile
}

#[test]
fn every_built_in_profile_is_sound_and_survives_its_text() {
    for name in example_names().into_iter().chain(["default"]) {
        let profile = example(name).unwrap();
        assert_eq!(profile.name, name);
        assert_eq!(Profile::from_json(&profile.to_json()).unwrap(), profile);
        assert!(!profile.host.products.is_empty(), "{name}");
        assert!(!profile.host.attention.is_empty(), "{name}");
    }
    assert_eq!(default_profile().source, Source::Default);
}

#[test]
fn an_unknown_name_lists_what_there_is() {
    let error = example("nothing").unwrap_err().to_string();
    for name in example_names() {
        assert!(error.contains(name), "{error}");
    }
}

#[test]
fn figures_are_numbers_or_have_a_spread() {
    let figure: Figure = serde_json::from_str("3").unwrap();
    assert_eq!(figure, Figure::exact(3.0));
    let figure: Figure = serde_json::from_str(r#"{"value": 3.5, "spread": 0.25}"#).unwrap();
    assert_eq!((figure.value, figure.spread), (3.5, 0.25));
    assert_eq!(
        serde_json::from_str::<Figure>(&serde_json::to_string(&figure).unwrap()).unwrap(),
        figure
    );
    for wrong in [
        r#""3""#,
        r#"{"spread": 1}"#,
        r#"{"value": 1, "sprad": 1}"#,
        "null",
        "1e999",
    ] {
        assert!(serde_json::from_str::<Figure>(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn spread_is_half_of_the_middle_half() {
    let figure = Figure::of_readings(&[5.0, 1.0, 3.0, 2.0, 4.0]).unwrap();
    assert_eq!((figure.value, figure.spread), (3.0, 1.0));
    assert_eq!(Figure::of_readings(&[7.0]), Some(Figure::exact(7.0)));
    assert_eq!(Figure::of_readings(&[]), None);
    assert_eq!(Figure::of_readings(&[1.0, f64::NAN]), None);
}

#[test]
fn every_figure_that_cannot_be_is_refused_by_name() {
    let sound = measured();
    sound.validate().unwrap();
    for (path, _, unit) in sound.figures() {
        let (_, high) = unit.range();
        for wrong in [f64::NAN, f64::INFINITY, -1.0, high * 2.0] {
            let mut profile = sound.clone();
            profile.visit_mut(&mut |p, figure, _| {
                if p == path {
                    figure.value = wrong;
                }
            });
            let error = profile.validate().unwrap_err().to_string();
            assert!(error.contains(&path), "{path} = {wrong}: {error}");
        }
        let mut profile = sound.clone();
        profile.visit_mut(&mut |p, figure, _| {
            if p == path {
                figure.spread = f64::NAN;
            }
        });
        assert!(profile.validate().unwrap_err().to_string().contains(&path));
    }
    let mut profile = sound.clone();
    profile.host.read_gb_s.all.value = 0.0;
    let error = profile.validate().unwrap_err().to_string();
    assert_eq!(
        error,
        "profile: host.read_gb_s.all is 0, expected 0.001 to 1000000 GB/s"
    );
}

#[test]
fn memory_and_lists_are_checked() {
    type Spoil = fn(&mut Profile);
    let spoils: [(&str, Spoil); 7] = [
        ("host.memory_total_bytes", |p| p.host.memory_total_bytes = 0),
        ("host.memory_available_bytes", |p| {
            p.host.memory_available_bytes = p.host.memory_total_bytes + 1;
        }),
        ("device.free_bytes", |p| {
            p.device.as_mut().unwrap().free_bytes = u64::MAX;
        }),
        ("device.link.to_device_pinned", |p| {
            p.device.as_mut().unwrap().link.to_device_pinned.clear();
        }),
        ("device.link.from_device_pinned", |p| {
            p.device.as_mut().unwrap().link.from_device_pinned.reverse();
        }),
        ("host.products", |p| {
            let one = p.host.products[0].clone();
            p.host.products = vec![one; limits::PROFILE_LIST_MAX + 1];
        }),
        ("host.attention", |p| p.host.attention[0].shape.heads_kv = 0),
    ];
    for (field, spoil) in spoils {
        let mut profile = measured();
        spoil(&mut profile);
        let error = profile.validate().unwrap_err().to_string();
        assert!(error.contains(field), "{field}: {error}");
    }
}

#[test]
fn texts_that_are_no_profile_are_refused() {
    let text = default_profile().to_json();
    let changed = |from: &str, to: &str| {
        assert!(text.contains(from), "{from}");
        Profile::from_json(&text.replacen(from, to, 1))
            .unwrap_err()
            .to_string()
    };
    assert!(changed("\"version\": 1", "\"version\": 2").contains("version 2, expected 1"));
    assert!(changed("\"fork_join_us\"", "\"fork_join\"").contains("fork_join"));
    assert!(changed("\"isa\": \"avx2\"", "\"isa\": 2").contains("line"));
    assert!(Profile::from_json("").is_err());
    assert!(Profile::from_json(&" ".repeat(limits::PROFILE_TEXT_BYTES_MAX + 1)).is_err());
}

#[test]
fn noise_changes_nothing_and_news_is_taken() {
    let old = measured();
    let mut new = old.clone();
    new.visit_mut(&mut |_, figure, _| figure.value *= 1.03);
    new.host.memory_available_bytes -= 1;
    let accepted = old.accept(&new);
    assert_eq!(accepted.changes, []);
    assert_eq!(
        accepted.profile.host.memory_available_bytes,
        new.host.memory_available_bytes
    );
    assert_eq!(accepted.profile.figures(), old.figures());

    new.host.read_gb_s.all.value = old.host.read_gb_s.all.value * 0.8;
    let accepted = old.accept(&new);
    let [change] = &accepted.changes[..] else {
        panic!("{:?}", accepted.changes)
    };
    assert_eq!(change.path, "host.read_gb_s.all");
    assert_eq!(change.old, Some(old.host.read_gb_s.all));
    assert_eq!(accepted.profile.host.read_gb_s.all, new.host.read_gb_s.all);

    new.key.driver = "another".to_owned();
    assert_eq!(old.accept(&new).profile, new);
}

#[test]
fn a_disturbed_figure_replaces_no_clean_one() {
    let path = "host.read_gb_s.all".to_owned();
    let clean = measured();
    let mut doubtful = clean.clone();
    doubtful.visit_mut(&mut |_, figure, _| figure.value *= 0.5);
    doubtful.disturbed = vec![path.clone()];
    doubtful.guessed = vec!["host.fork_join_us".to_owned()];
    let accepted = clean.accept(&doubtful);
    let (old, new) = (&clean.host, &accepted.profile.host);
    assert_eq!(
        (new.read_gb_s.all, new.fork_join_us),
        (old.read_gb_s.all, old.fork_join_us)
    );
    assert_eq!(new.read_gb_s.one, doubtful.host.read_gb_s.one);
    assert_eq!(
        (
            accepted.profile.disturbed.len(),
            accepted.profile.guessed.len()
        ),
        (0, 0)
    );
    // What was doubtful is replaced by what is not, however close; and stays what it is if it stays.
    let mut close = doubtful.clone();
    (close.disturbed, close.guessed) = (Vec::new(), Vec::new());
    close.host.read_gb_s.all.value *= 1.001;
    let accepted = doubtful.accept(&close).profile;
    assert_eq!(accepted.host.read_gb_s.all, close.host.read_gb_s.all);
    assert_eq!((accepted.disturbed.len(), accepted.guessed.len()), (0, 0));
    let accepted = doubtful.accept(&doubtful).profile;
    assert_eq!(
        (&accepted.disturbed, accepted.guessed.len()),
        (&vec![path], 1)
    );
    let read = Profile::from_json(&doubtful.to_json()).unwrap();
    assert_eq!(
        (read.disturbed, read.guessed),
        (doubtful.disturbed.clone(), doubtful.guessed.clone())
    );
    doubtful.guessed = vec![String::new(); limits::PROFILE_DOUBTS_MAX + 1];
    assert!(
        doubtful
            .validate()
            .unwrap_err()
            .to_string()
            .contains("guessed")
    );
}

#[test]
fn what_was_not_measured_before_is_taken() {
    let mut old = measured();
    let new = old.clone();
    old.host.products.clear();
    let accepted = old.accept(&new);
    assert_eq!(accepted.profile, new);
    assert_eq!(accepted.changes.len(), 3 * new.host.products.len());
    assert!(accepted.changes.iter().all(|c| c.old.is_none()));
}

#[test]
fn every_term_can_be_set_by_name() {
    let sound = measured();
    for term in OVERRIDES {
        let value = if term.name.ends_with("_mib") {
            4096.0
        } else {
            0.75
        };
        let mut profile = sound.clone();
        profile.set(term.name, value).unwrap();
        assert_ne!(profile, sound, "{}", term.name);
        let mut again = profile.clone();
        again.set(term.name, value).unwrap();
        assert_eq!(again, profile);
        for wrong in [f64::NAN, -1.0, f64::INFINITY] {
            let error = again.set(term.name, wrong).unwrap_err();
            assert_eq!(again, profile, "{error}");
        }
    }
    // And every figure is reached by some name.
    for (path, _, _) in sound.figures() {
        let mut profile = sound.clone();
        profile.set(&path, 0.5).unwrap();
        let reached = OVERRIDES.iter().any(|term| {
            let mut profile = sound.clone();
            profile
                .set(term.name, 4096.0)
                .is_ok_and(|()| changed(&sound, &profile, &path))
                || profile
                    .set(term.name, 0.5)
                    .is_ok_and(|()| changed(&sound, &profile, &path))
        });
        assert!(reached, "{path}");
    }
}

fn changed(old: &Profile, new: &Profile, path: &str) -> bool {
    let find = |p: &Profile| p.figures().into_iter().find(|(q, ..)| q == path);
    find(old) != find(new)
}

#[test]
fn terms_of_a_device_need_one() {
    let mut profile = default_profile();
    for name in ["link_gb_s", "device_free_mib", "t_sync_us"] {
        let error = profile.set(name, 10.0).unwrap_err().to_string();
        assert!(
            error.contains(name) && error.contains("has none"),
            "{error}"
        );
    }
    assert!(profile.set("no_such_term", 1.0).is_err());
    profile.set("engage_ms", 0.8).unwrap();
    assert_eq!(profile.host.engage.engage_ms, Some(Figure::exact(0.8)));
}

#[test]
fn slope_and_intercept_of_the_published_hosts() {
    // Times that the published slope and engage cost give at 8192 and 256 cells.
    for (slope, engage) in [(6.2e-4, 0.80), (2.6e-4, 0.82)] {
        let at = |cells: u64| (cells, Figure::exact(engage + slope * cells as f64));
        let fit = Engage::of_two_sizes(at(256), at(8192)).unwrap();
        assert!((fit.slope_ms_cell.unwrap().value - slope).abs() < 1e-12);
        assert!((fit.engage_ms.unwrap().value - engage).abs() < 1e-9);
    }
    let flat = (256, Figure::exact(1.0));
    assert_eq!(Engage::of_two_sizes(flat, flat), None);
    let falling = Engage::of_two_sizes((256, Figure::exact(2.0)), (8192, Figure::exact(1.0)));
    assert_eq!(falling.unwrap().slope_ms_cell.unwrap().value, 0.0);
}
