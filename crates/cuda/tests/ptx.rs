//! The compiled kernels belong to their sources, and say nothing that would round otherwise than the definition.

#[path = "../kernels/sources.rs"]
mod sources;

use flate2::read::GzDecoder;
use std::fs::File;
use std::io::Read;
use std::path::PathBuf;

fn kernels() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("kernels")
}

/// Every source's compiled files: name, target, text.
fn compiled() -> Vec<(String, &'static str, String)> {
    let mut all = Vec::new();
    for name in sources::names(&kernels()).expect("the folder of kernels") {
        for target in ["sm_80", "sm_90a"] {
            let path = kernels()
                .join("ptx")
                .join(format!("{name}.{target}.ptx.gz"));
            let file = File::open(&path)
                .unwrap_or_else(|e| panic!("{}: {e}; run `xtask ptx`", path.display()));
            let mut text = String::new();
            let read = GzDecoder::new(file).read_to_string(&mut text);
            read.unwrap_or_else(|e| panic!("{}: {e}", path.display()));
            all.push((name.clone(), target, text));
        }
    }
    assert!(!all.is_empty(), "there are kernels");
    all
}

#[test]
fn ptx_and_sources_belong_together() {
    for (name, target, text) in compiled() {
        let digest = sources::digest(&kernels(), &name).expect("sources");
        assert_eq!(
            text.lines().next(),
            Some(format!("{}{digest}", sources::MARK).as_str()),
            "{name}.{target}.ptx was made of other sources; run `xtask ptx`"
        );
        assert!(
            text.contains("\n.version 8.0\n"),
            "{name}.{target}: version"
        );
        assert!(
            text.contains(&format!("\n.target {target}\n")),
            "{name}.{target}: target"
        );
    }
}

#[test]
fn every_source_is_embedded() {
    let names: Vec<_> = cuda::ptx::names().map(str::to_owned).collect();
    assert_eq!(
        names,
        sources::names(&kernels()).expect("the folder of kernels"),
        "run `xtask ptx`"
    );
}

/// Sources whose arithmetic is not defined bit for bit (they run in one place only), so that any instruction will do.
const UNDEFINED: &[&str] = &["attention_prefill"];

/// Whether an instruction may round otherwise than the scalar code: approximations, flushed denormals, and operations whose
/// rounding is not named, which the assembler may contract to `fma`.
fn is_loose(instruction: &str) -> bool {
    let operation = instruction
        .split_whitespace()
        .find(|word| !word.starts_with('@'));
    let Some(operation) = operation else {
        return false;
    };
    let mut parts = operation.trim_end_matches(';').split('.');
    let name = parts.next().unwrap_or_default();
    let parts: Vec<_> = parts.collect();
    let rounds = matches!(
        name,
        "mul" | "add" | "sub" | "div" | "sqrt" | "rcp" | "fma" | "mad"
    );
    let float = parts.contains(&"f32") || parts.contains(&"f64");
    parts.contains(&"approx")
        || parts.contains(&"ftz")
        || parts.contains(&"full")
        || (rounds && float && !["rn", "rz", "rm", "rp"].iter().any(|r| parts.contains(r)))
}

#[test]
fn loose_instructions_are_found() {
    for loose in [
        "mul.f32 %f1, %f2, %f3;",
        "@%p1 add.f32 %f1, %f2, %f3;",
        "ex2.approx.ftz.f32 %f1, %f2;",
        "div.full.f32 %f1, %f2, %f3;",
        "fma.rn.ftz.f32 %f1, %f2, %f3, %f4;",
        "sqrt.approx.f32 %f1, %f2;",
    ] {
        assert!(is_loose(loose), "{loose}");
    }
    for strict in [
        "mul.rn.f32 %f1, %f2, %f3;",
        "add.s32 %r1, %r2, %r3;",
        "add.rz.f32 %f1, %f2, %f3;",
        "fma.rn.f32 %f1, %f2, %f3, %f4;",
        "mul.wide.s32 %rd1, %r1, 4;",
        "max.f32 %f1, %f2, %f3;",
        "mov.f32 %f1, 0f00000000;",
    ] {
        assert!(!is_loose(strict), "{strict}");
    }
}

#[test]
fn defined_operations_have_no_loose_instructions() {
    for (name, target, text) in compiled() {
        if UNDEFINED.contains(&name.as_str()) {
            eprintln!("not looked at: {name}, whose arithmetic is not defined");
            continue;
        }
        let loose: Vec<_> = text.lines().filter(|line| is_loose(line)).take(5).collect();
        assert!(loose.is_empty(), "{name}.{target}: {loose:?}");
    }
}
