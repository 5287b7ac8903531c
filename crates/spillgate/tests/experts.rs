//! From outside: a mixture's logits are the same bytes wherever its experts are and whoever computes them.

mod common;
#[path = "../../engine/tests/common/twins.rs"]
mod twins;

use std::path::Path;
use std::process::Output;

use common::{smollm2, spillgate, stderr};
use serde_json::Value;

fn stdout(output: &Output) -> String {
    let success = output.status.success();
    assert!(success, "{}: {}", output.status, stderr(output));
    String::from_utf8(output.stdout.clone()).expect("stdout is UTF-8")
}

fn path(path: &Path) -> &str {
    path.to_str().expect("a name in UTF-8")
}

#[test]
fn logits_are_the_same_wherever_experts_are() {
    let Some(dense) = smollm2("logits_are_the_same_wherever_experts_are") else {
        return;
    };
    let dir = tempfile::TempDir::new().unwrap();
    let (model, ids) = (dir.path().join("twins.gguf"), dir.path().join("ids.txt"));
    twins::write(&dense, &model, 1);
    let tokens: Vec<String> = (0..150).map(|i| (i * i % 4001 + 300).to_string()).collect();
    std::fs::write(&ids, tokens.join(" ")).unwrap();
    let run = |more: &[&str]| {
        let base = [
            "eval",
            "logits",
            path(&model),
            "--hash",
            "--tokens",
            path(&ids),
        ];
        spillgate(&[&base[..], more, &["--device", "cpu"]].concat())
    };
    let hash = |more: &[&str]| stdout(&run(more)).lines().last().unwrap().to_owned();
    let resident = hash(&[]);
    assert_eq!(resident.len(), 64);
    for placed in [
        &["--expert-cache", "0", "--cpu-share", "off"][..],
        &[
            "--expert-cache",
            "0",
            "--cpu-share",
            "1",
            "--pool-workers",
            "1",
        ],
        &[
            "--expert-cache",
            "10%",
            "--cpu-share",
            "0.3",
            "--ubatch",
            "8",
        ],
        &[
            "--expert-cache",
            "10%",
            "--cpu-share",
            "0.7",
            "--ubatch",
            "64",
            "--isa",
            "avx2",
        ],
        &[
            "--expert-cache",
            "50%",
            "--cpu-share",
            "auto",
            "--ubatch",
            "512",
        ],
        &[
            "--expert-cache",
            "40",
            "--cpu-share",
            "off",
            "--ubatch",
            "1",
        ],
        &[
            "--by-token",
            "--expert-cache",
            "50%",
            "--cpu-share-decode",
            "0.5",
        ],
        &[
            "--by-token",
            "--expert-cache",
            "10%",
            "--cpu-share-decode",
            "off",
        ],
        &["--device-mem", "110", "--ctx", "256"],
    ] {
        // Processors without the instruction set have nothing to compare.
        let has_avx2 = || {
            cpu::Isa::available()
                .iter()
                .any(|isa| isa.to_string() == "avx2")
        };
        if placed.contains(&"avx2") && !has_avx2() {
            eprintln!("skipped: {placed:?}");
            continue;
        }
        let output = run(placed);
        let text = stderr(&output);
        assert!(text.contains("slots for experts"), "{placed:?}: {text}");
        assert_eq!(
            stdout(&output).lines().last(),
            Some(&*resident),
            "{placed:?}"
        );
    }
    for bad in [
        ["--expert-cache", "101%"],
        ["--cpu-share", "2"],
        ["--pool-workers", "0"],
    ] {
        assert!(!run(&bad).status.success(), "{bad:?}");
    }

    // What a plan says of it.
    let plan = |more: &[&str]| {
        let base = [
            "plan",
            path(&model),
            "--device",
            "cpu",
            "--expert-cache",
            "50%",
        ];
        stdout(&spillgate(&[&base[..], more].concat()))
    };
    let json: Value = serde_json::from_str(&plan(&["--json"])).unwrap();
    let layout = &json["layout"];
    let bytes = |name: &str| layout[name].as_u64().unwrap() as f64;
    let all = json["expert_bytes"].as_u64().unwrap() as f64;
    assert!(
        (bytes("expert_cache_bytes") / all - 0.5).abs() < 0.01,
        "{layout}"
    );
    assert!(layout["expert_hits"].as_f64() > Some(0.4), "{layout}");
    assert!(plan(&[]).contains("expert cache: "), "{}", plan(&[]));

    // What is recorded, and how experts were served.
    let (routing, windows) = (dir.path().join("r.jsonl"), dir.path().join("w.jsonl"));
    let base = [
        "bench",
        path(&model),
        "--device",
        "cpu",
        "-p",
        "20",
        "-n",
        "4",
        "-r",
        "1",
        "--json",
    ];
    let flags = [
        "--expert-cache",
        "25%",
        "--cpu-share",
        "off",
        "--cpu-share-decode",
        "1",
    ];
    let records = [
        "--record-routing",
        path(&routing),
        "--record-windows",
        path(&windows),
    ];
    let out = stdout(&spillgate(&[&base[..], &flags, &records].concat()));
    let json: Value = serde_json::from_str(&out).unwrap();
    let (prompt, generated) = (&json["experts"]["prompt"], &json["experts"]["generated"]);
    assert!(
        prompt["streamed"].as_u64() > Some(0) && prompt["host"] == 0,
        "{out}"
    );
    assert!(
        generated["host"].as_u64() > Some(0) && generated["streamed"] == 0,
        "{out}"
    );
    let read = |path: &Path| std::fs::read_to_string(path).unwrap();
    let (header, records) = place::routing::read(&read(&routing)).unwrap();
    assert!(header.layers.len() == 30 && records.len().is_multiple_of(30));
    let windows = place::windows::Recording::parse(&read(&windows));
    let windows = windows.unwrap().windows;
    assert!(windows.iter().any(|w| w.tokens == 1 && w.share == 1.0));

    // Records that are not whole are told of, behind what was measured.
    if cfg!(target_os = "linux") {
        for record in ["--record-routing", "--record-windows"] {
            let full = [record, "/dev/full"];
            let output = spillgate(&[&base[..], &flags, &full].concat());
            assert_eq!(output.status.code(), Some(1), "{record}");
            assert!(!output.stdout.is_empty(), "{record}");
            let text = stderr(&output);
            assert!(text.contains("cannot write all of what was"), "{text}");
        }
    }
}
