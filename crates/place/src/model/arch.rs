//! What architectures do that their files do not say.
//!
//! The rules are those that loaders follow for files without the keys; a key of the file wins over them.

/// Which layers see a window only, where the file has no pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Windows {
    /// None: a window's length in the file means nothing.
    None,
    /// Of every `period` layers all but the last.
    LastFull {
        /// Layers a period.
        period: u64,
    },
    /// Of every `period` layers all but the first.
    FirstFull {
        /// Layers a period.
        period: u64,
    },
    /// All.
    All,
}

impl Windows {
    /// Whether layer `i` is windowed.
    pub(super) fn has(self, i: usize) -> bool {
        let i = i as u64;
        match self {
            Windows::None => false,
            Windows::All => true,
            // A period of 0 stands for windows everywhere, one of 1 for none.
            Windows::LastFull { period } => period == 0 || i % period < period - 1,
            Windows::FirstFull { period } => period == 0 || !i.is_multiple_of(period),
        }
    }

    /// The same order of layers with the file's period.
    pub(super) fn with_period(self, period: u64) -> Windows {
        match self {
            Windows::FirstFull { .. } => Windows::FirstFull { period },
            _ => Windows::LastFull { period },
        }
    }
}

/// What is known of an architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Arch {
    /// Its name in files.
    pub(super) name: &'static str,
    /// Which layers are windowed, where the file has no pattern.
    pub(super) windows: Windows,
    /// Tokens of a window, where the file does not say.
    pub(super) window_default: Option<u64>,
    /// The only number of layers of which `windows` is true.
    pub(super) windows_only_at: Option<usize>,
    /// Layers from the start that have cells of their own; the others use theirs.
    pub(super) caching_first: Option<usize>,
    /// Layer `i` attends when this divides `i + 1`, and has state else; the file's `full_attention_interval` wins.
    pub(super) attention_interval: Option<u64>,
}

impl Arch {
    const fn plain(name: &'static str) -> Arch {
        Arch {
            name,
            windows: Windows::None,
            window_default: None,
            windows_only_at: None,
            caching_first: None,
            attention_interval: None,
        }
    }

    const fn last_full(name: &'static str, period: u64) -> Arch {
        Arch {
            windows: Windows::LastFull { period },
            ..Arch::plain(name)
        }
    }

    const fn first_full(name: &'static str, period: u64) -> Arch {
        Arch {
            windows: Windows::FirstFull { period },
            ..Arch::plain(name)
        }
    }

    const fn hybrid(name: &'static str) -> Arch {
        Arch {
            attention_interval: Some(4),
            ..Arch::plain(name)
        }
    }

    /// Stands for one that is not known.
    pub(super) const fn unknown() -> Arch {
        Arch::plain("")
    }

    /// What is known of the architecture with this name.
    pub(super) fn find(name: &str) -> Option<&'static Arch> {
        ARCHS.iter().find(|arch| arch.name == name)
    }
}

/// Every architecture whose rules are known. The plain ones keep K and V of every token in every layer, or say otherwise in
/// their files' keys.
static ARCHS: &[Arch] = &[
    Arch::plain("llama"),
    Arch::plain("mistral3"),
    Arch::plain("qwen2"),
    Arch::plain("qwen2moe"),
    Arch::plain("qwen3"),
    Arch::plain("qwen3moe"),
    Arch::plain("gemma"),
    // The window of phi3 is in its files, and no loader follows it.
    Arch::plain("phi3"),
    Arch::plain("phi2"),
    Arch::plain("olmo"),
    Arch::plain("olmoe"),
    Arch::plain("deepseek"),
    Arch::plain("deepseek2"),
    Arch::plain("glm4"),
    Arch::plain("glm4moe"),
    Arch::plain("command-r"),
    Arch::plain("exaone"),
    Arch::plain("granite"),
    Arch::plain("granitemoe"),
    Arch::plain("starcoder2"),
    Arch::plain("stablelm"),
    Arch::plain("internlm2"),
    Arch::plain("smollm3"),
    Arch::plain("bitnet"),
    Arch::plain("bailingmoe"),
    Arch::plain("bailingmoe2"),
    // Latent attention in some layers, linear attention in those without key heads.
    Arch::plain("bailingmoe3"),
    // Its files have one truth value a layer.
    Arch::plain("gemma4"),
    Arch::last_full("gpt-oss", 2),
    Arch {
        window_default: Some(4096),
        ..Arch::last_full("gemma2", 2)
    },
    Arch::last_full("gemma3", 6),
    Arch {
        caching_first: Some(20),
        ..Arch::last_full("gemma3n", 5)
    },
    Arch::last_full("cohere2", 4),
    Arch {
        // Chunks rather than windows; a layer needs as many cells for either.
        window_default: Some(8192),
        ..Arch::last_full("llama4", 4)
    },
    Arch {
        // The small models of the family see everything.
        windows_only_at: Some(64),
        window_default: Some(4096),
        ..Arch::last_full("exaone4", 4)
    },
    Arch::first_full("laguna", 4),
    Arch::first_full("cohere2moe", 4),
    Arch {
        windows: Windows::All,
        ..Arch::plain("deepseek4")
    },
    Arch::hybrid("qwen3next"),
    Arch::hybrid("qwen35"),
    Arch::hybrid("qwen35moe"),
];

#[cfg(test)]
mod tests {
    use super::*;

    fn full(windows: Windows, layers: usize) -> Vec<usize> {
        (0..layers).filter(|&i| !windows.has(i)).collect()
    }

    #[test]
    fn periods() {
        let gemma3 = Windows::LastFull { period: 6 };
        assert_eq!(full(gemma3, 62), [5, 11, 17, 23, 29, 35, 41, 47, 53, 59]);
        assert_eq!(full(Windows::LastFull { period: 2 }, 5), [1, 3]);
        assert_eq!(full(Windows::FirstFull { period: 4 }, 9), [0, 4, 8]);
        assert_eq!(full(Windows::LastFull { period: 1 }, 3), [0, 1, 2]);
        assert_eq!(full(Windows::FirstFull { period: 1 }, 3), [0, 1, 2]);
        assert_eq!(full(Windows::LastFull { period: 0 }, 3), [0_usize; 0]);
        assert_eq!(full(Windows::All, 3), [0_usize; 0]);
        assert_eq!(full(Windows::None, 2), [0, 1]);
        let first = Windows::FirstFull { period: 4 }.with_period(3);
        assert_eq!(full(first, 5), [0, 3]);
    }

    #[test]
    fn names_are_there_once() {
        for (i, arch) in ARCHS.iter().enumerate() {
            let same = |other: &&Arch| other.name == arch.name;
            assert_eq!(ARCHS.iter().position(|other| same(&other)), Some(i));
        }
    }
}
