//! `replay`, through the program.

mod common;

use std::fs;

use common::{spillgate, stderr};
use place::windows::{Header, Window};
use serde_json::Value;
use tempfile::TempDir;

fn json(args: &[&str]) -> Value {
    let output = spillgate(&[&["replay", "--json"], args].concat());
    assert!(output.status.success(), "{}", stderr(&output));
    serde_json::from_slice(&output.stdout).expect("it is JSON")
}

/// A prompt's windows with a share: 16 layers, each 10 ms alone.
fn windows(share: f64) -> String {
    let lines = (0..16).map(|layer| {
        let window = Window {
            prompt: 600,
            chunk: 0,
            tokens: 512,
            layer,
            missing: 20,
            on_cpu: (20.0 * share) as u32,
            share,
            ms: 10.0 * (1.0 - 0.4 * share),
            host_ms: Some(1.0 + share),
            one_time: false,
        };
        window.line() + "\n"
    });
    Header::new("a model", "a machine").line() + "\n" + &lines.collect::<String>()
}

/// A hundred generated tokens through a layer of eight experts, which use the first and the second by turns.
fn routing() -> String {
    let header = r#"{"routing":1,"model":"m","layers":[{"layer":0,"experts":8,"used":1,"blob_bytes":1000}]}"#;
    let records = (0..100).map(|i| {
        format!(
            r#"{{"layer":0,"position":{i},"tokens":1,"generated":true,"used":[[{},1]]}}"#,
            i % 2
        ) + "\n"
    });
    format!("{header}\n{}", records.collect::<String>())
}

#[test]
fn published_machines_are_generated() {
    let report = json(&["-r", "3"]);
    let cases = report["cases"].as_array().expect("there are cases");
    assert_eq!(cases.len(), 14);
    for case in cases {
        let (every, published) = (&case["every"], &case["published"]);
        let off = every.as_f64().unwrap() - published["every"].as_f64().unwrap();
        assert!(off.abs() < 6e-4, "{case}");
        let wins = every.as_f64().unwrap() < 1.0;
        assert_eq!(case.get("kept").is_some(), wins, "{case}");
        assert_eq!(case.get("lost").is_some(), !wins, "{case}");
    }
    assert!(report["constants"].as_array().unwrap().len() > 4);
    assert!(report.get("recorded").is_none());
    // Another effect is compared with nothing.
    let half = json(&["-r", "2", "--effect", "0.5"]);
    let cases = half["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 7);
    assert!(cases.iter().all(|case| case.get("published").is_none()));
}

#[test]
fn recordings_are_replayed() {
    let folder = TempDir::new().unwrap();
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        fs::write(&path, text).unwrap();
        path.into_os_string().into_string().unwrap()
    };
    let (alone, shared) = (
        write("a.jsonl", &windows(0.0)),
        write("b.jsonl", &windows(0.5)),
    );
    let report = json(&["-r", "5", "--effect", "1", &alone, &shared]);
    let case = &report["cases"][0];
    assert_eq!(case["tokens"], 600);
    assert!((case["every"].as_f64().unwrap() - 0.8).abs() < 1e-9);
    let recorded = report["recorded"].as_array().unwrap();
    let column =
        |name: &str| -> Vec<f64> { recorded.iter().map(|r| r[name].as_f64().unwrap()).collect() };
    assert_eq!(column("share"), [0.0, 0.5]);
    assert_eq!(column("sum_ms"), [160.0, 128.0]);
    assert_eq!(column("host_us"), [50.0, 150.0]);
    let text = spillgate(&["replay", "-r", "2", &alone, &shared]);
    let text = String::from_utf8(text.stdout).unwrap();
    for word in ["EVERY LAYER", "recorded", "CONSTANTS", "chosen", "HOST, US"] {
        assert!(text.contains(word), "{word}: {text}");
    }

    let routing = write("r.jsonl", &routing());
    let caches = json(&[&routing]);
    assert!(caches.get("cases").is_none() && caches.get("constants").is_none());
    let caches = caches["caches"].as_array().unwrap();
    assert_eq!(caches.len(), 8);
    for cache in caches {
        // Two of eight experts are used, by turns: a tenth of the memory holds none, a quarter both.
        let hits = cache["generated"].as_f64().unwrap();
        let expected = match (cache["policy"].as_str(), cache["part_percent"].as_u64()) {
            (_, Some(10)) => 0.0..=0.0,
            (_, Some(25..)) => 0.9..=1.0,
            other => panic!("{other:?}"),
        };
        assert!(expected.contains(&hits), "{cache}");
        assert!(cache["prompt"].is_null());
    }
    let text = spillgate(&["replay", &routing]);
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(text.contains("r.jsonl") && text.contains("lru"), "{text}");

    for (args, what) in [
        (&["replay", &alone][..], "without a share and with one"),
        (&["replay", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (&["replay", &write("c.jsonl", "{}")], "line 1"),
        (&["replay", "--noise=-1"], "0 to 100"),
        (&["replay", "--effect", "0"], "more than 0"),
        (&["replay", "--planned-share", "0.5"], "RECORDING"),
        (&["replay", "-r", "0"], "1..=100000"),
    ] {
        let output = spillgate(args);
        assert!(!output.status.success() && output.stdout.is_empty());
        let text = stderr(&output);
        assert!(text.contains(what), "{args:?}: {text}");
    }
}
