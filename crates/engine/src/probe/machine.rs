//! Which machine it is, as far as that shapes a measurement.

use std::fs;

/// The processor's name, family and the vector features that kernels are chosen by.
pub fn cpu_name() -> String {
    cpu_name_in(&fs::read_to_string("/proc/cpuinfo").unwrap_or_default())
}

/// Virtual machines often hide the model's name, but not its family and what it can do.
fn cpu_name_in(cpuinfo: &str) -> String {
    let get = |name| field(cpuinfo, name).unwrap_or("unknown");
    let flags: Vec<&str> = get("flags").split(' ').collect();
    let shown = ["avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8"];
    let has: Vec<&str> = shown.into_iter().filter(|f| flags.contains(f)).collect();
    format!(
        "{}, family {} model {} stepping {}, {}",
        get("model name"),
        get("cpu family"),
        get("model"),
        get("stepping"),
        has.join(" ")
    )
}

/// The value of a line `name : value`.
pub fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then_some(value.trim())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found() {
        let text =
            "processor\t: 0\nmodel name\t: A CPU\nmodel\t\t: 7\nflags\t\t: sse2 avx2 amx_int8\n";
        assert_eq!(
            cpu_name_in(text),
            "A CPU, family unknown model 7 stepping unknown, avx2 amx_int8"
        );
    }
}
