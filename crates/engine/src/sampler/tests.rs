use proptest::prelude::*;

use super::*;

/// No stage takes anything away.
fn plain() -> SamplerParams {
    SamplerParams {
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        temperature: 1.0,
        ..SamplerParams::default()
    }
}

fn sampler(params: SamplerParams, n_vocab: usize) -> Sampler {
    Sampler::new(params, n_vocab).unwrap_or_else(|e| panic!("{e}"))
}

/// How often each token is drawn in `n` draws at successive positions.
fn draws(params: SamplerParams, logits: &[f32], n: u32) -> Vec<u32> {
    let mut counts = vec![0; logits.len()];
    for seed in 0..u64::from(n) {
        let mut sampler = sampler(
            SamplerParams {
                seed,
                ..params.clone()
            },
            logits.len(),
        );
        counts[sampler.sample(logits).expect("draws") as usize] += 1;
    }
    counts
}

#[test]
fn greedy_looks_at_all_of_many() {
    let n = 10_003;
    for at in [0, 4095, 4096, 9999, n - 1] {
        let mut logits = vec![0.5; n];
        logits[at] = 2.0;
        logits[n - 1] = 2.0;
        let mut sampler = sampler(SamplerParams::greedy(), n);
        assert_eq!(sampler.sample(&logits), Ok(at as u32));
        for bad in [f32::NAN, f32::INFINITY] {
            let place = (at + 77) % n;
            let mut logits = logits.clone();
            logits[place] = bad;
            let error = sampler.sample(&logits).unwrap_err();
            let is_told =
                matches!(error, SamplerError::BadLogit { id, .. } if id as usize == place);
            assert!(is_told, "{error}");
        }
    }
}

#[test]
fn greedy_takes_the_lowest_of_equals() {
    let mut sampler = sampler(SamplerParams::greedy(), 4);
    assert_eq!(sampler.sample(&[1.0, 3.0, 3.0, f32::NEG_INFINITY]), Ok(1));
    assert_eq!(sampler.sample(&[-0.0, 0.0, -1.0, -2.0]), Ok(0));
}

#[test]
fn draws_follow_the_probabilities() {
    let logits = [1.0_f32.ln(), 2.0_f32.ln(), 5.0_f32.ln()];
    // Expected 1250, 2500, 6250; standard deviations 33, 43, 48.
    let counts = draws(plain(), &logits, 10_000);
    assert!(
        counts
            .iter()
            .zip([1250, 2500, 6250])
            .all(|(&n, e)| u32::abs_diff(n, e) < 250),
        "{counts:?}"
    );
    // At half the temperature the weights are squared.
    let counts = draws(
        SamplerParams {
            temperature: 0.5,
            ..plain()
        },
        &logits,
        10_000,
    );
    assert!(
        counts
            .iter()
            .zip([333, 1333, 8333])
            .all(|(&n, e)| u32::abs_diff(n, e) < 250),
        "{counts:?}"
    );
}

#[test]
fn every_cut_takes_tokens_away() {
    let logits: Vec<f32> = [1.0_f32, 2.0, 3.0, 4.0, 10.0]
        .iter()
        .map(|p| p.ln())
        .collect();
    let never = |params: SamplerParams| -> Vec<usize> {
        let counts = draws(params, &logits, 600);
        (0..5).filter(|&i| counts[i] == 0).collect()
    };
    assert_eq!(never(plain()), [0; 0]);
    assert_eq!(
        never(SamplerParams {
            top_k: 2,
            ..plain()
        }),
        [0, 1, 2]
    );
    assert_eq!(
        never(SamplerParams {
            top_p: 0.6,
            ..plain()
        }),
        [0, 1, 2]
    );
    assert_eq!(
        never(SamplerParams {
            min_p: 0.25,
            ..plain()
        }),
        [0, 1]
    );
    // Surprises 3.0 2.3 1.9 1.6 0.7 around an expected 1.37.
    assert_eq!(
        never(SamplerParams {
            typical_p: 0.3,
            ..plain()
        }),
        [0, 1, 4]
    );
}

#[test]
fn biases() {
    let logits = [0.0, 0.0, 9.0];
    let greedy = |logit_bias| SamplerParams {
        logit_bias,
        ..SamplerParams::greedy()
    };
    assert_eq!(
        sampler(greedy(vec![(2, f32::NEG_INFINITY)]), 3).sample(&logits),
        Ok(0)
    );
    assert_eq!(sampler(greedy(vec![(1, 9.5)]), 3).sample(&logits), Ok(1));
    assert_eq!(
        sampler(greedy(vec![(1, f32::MAX), (1, f32::MAX)]), 3).sample(&[0.0, 1e38, 0.0]),
        Ok(1)
    );
    let all = (0..3).map(|id| (id, f32::NEG_INFINITY)).collect();
    assert_eq!(
        sampler(greedy(all), 3).sample(&logits),
        Err(SamplerError::NothingLeft)
    );
}

#[test]
fn accepted_tokens_are_penalised() {
    let params = SamplerParams {
        repeat_penalty: 2.0,
        penalty_last_n: 2,
        ..SamplerParams::greedy()
    };
    let mut sampler = sampler(params, 3);
    let logits = [2.0, 1.5, 1.2];
    for expected in [0, 1, 2, 0] {
        assert_eq!(sampler.sample(&logits), Ok(expected));
        sampler.accept(expected).expect("in range");
    }
    sampler.reset();
    assert_eq!((sampler.sample(&logits), sampler.position()), (Ok(0), 0));
}

#[test]
fn repetitions_are_broken() {
    let params = SamplerParams {
        dry_multiplier: 5.0,
        dry_allowed_length: 2,
        ..SamplerParams::greedy()
    };
    let tokens = [0, 1, 2, 3, 0, 1];
    let logits = [0.0, 0.0, 3.0, 1.0];
    let run = |params: SamplerParams| {
        let mut sampler = sampler(params, 4);
        tokens
            .iter()
            .for_each(|&t| sampler.accept(t).expect("in range"));
        sampler.sample(&logits)
    };
    assert_eq!(run(params.clone()), Ok(3));
    assert_eq!(
        run(SamplerParams {
            dry_breakers: vec![1],
            ..params.clone()
        }),
        Ok(2)
    );
    assert_eq!(
        run(SamplerParams {
            dry_allowed_length: 3,
            ..params
        }),
        Ok(2)
    );
}

#[test]
fn broken_logits_are_named() {
    for params in [SamplerParams::default(), SamplerParams::greedy()] {
        let mut sampler = sampler(params, 3);
        let nan = sampler.sample(&[0.0, f32::NAN, f32::NAN]);
        assert!(
            matches!(nan, Err(SamplerError::BadLogit { id: 1, logit }) if logit.is_nan()),
            "{nan:?}"
        );
        let infinite = sampler.sample(&[0.0, 0.0, f32::INFINITY]);
        assert_eq!(
            infinite,
            Err(SamplerError::BadLogit {
                id: 2,
                logit: f32::INFINITY
            })
        );
        assert_eq!(
            sampler.sample(&[0.0]),
            Err(SamplerError::Length {
                found: 1,
                expected: 3
            })
        );
        assert_eq!(
            sampler.sample(&[f32::NEG_INFINITY; 3]),
            Err(SamplerError::NothingLeft)
        );
        assert!(matches!(
            sampler.accept(3),
            Err(SamplerError::TokenOutOfRange {
                id: 3,
                n_vocab: 3,
                ..
            })
        ));
    }
}

#[test]
fn settings_out_of_range_are_named() {
    let wrong: [(&str, SamplerParams); 12] = [
        (
            "temperature",
            SamplerParams {
                temperature: -1.0,
                ..plain()
            },
        ),
        (
            "temperature",
            SamplerParams {
                temperature: f32::NAN,
                ..plain()
            },
        ),
        (
            "top-p",
            SamplerParams {
                top_p: 1.1,
                ..plain()
            },
        ),
        (
            "min-p",
            SamplerParams {
                min_p: -0.1,
                ..plain()
            },
        ),
        (
            "typical-p",
            SamplerParams {
                typical_p: f32::NAN,
                ..plain()
            },
        ),
        (
            "repeat-penalty",
            SamplerParams {
                repeat_penalty: 0.0,
                ..plain()
            },
        ),
        (
            "presence-penalty",
            SamplerParams {
                presence_penalty: f32::INFINITY,
                ..plain()
            },
        ),
        (
            "dry-base",
            SamplerParams {
                dry_base: 0.5,
                ..plain()
            },
        ),
        (
            "penalty-last-n",
            SamplerParams {
                penalty_last_n: -2,
                ..plain()
            },
        ),
        (
            "logit-bias",
            SamplerParams {
                logit_bias: vec![(0, f32::INFINITY)],
                ..plain()
            },
        ),
        (
            "logit-bias",
            SamplerParams {
                logit_bias: vec![(9, 0.0)],
                ..plain()
            },
        ),
        (
            "dry-breakers",
            SamplerParams {
                dry_breakers: vec![9],
                ..plain()
            },
        ),
    ];
    for (name, params) in wrong {
        let message = Sampler::new(params, 9).expect_err(name).to_string();
        assert!(message.contains(name), "{message}");
    }
}

#[test]
fn settings_as_json() {
    let params: SamplerParams =
        serde_json::from_str(r#"{"temperature": 0.5, "logit_bias": [[3, -1.5]]}"#).expect("reads");
    let expected = SamplerParams {
        temperature: 0.5,
        logit_bias: vec![(3, -1.5)],
        ..SamplerParams::default()
    };
    assert_eq!(params, expected);
    let text = serde_json::to_string(&expected).expect("writes");
    assert_eq!(
        serde_json::from_str::<SamplerParams>(&text).expect("reads"),
        expected
    );
    assert!(serde_json::from_str::<SamplerParams>(r#"{"temperatur": 1}"#).is_err());
}

#[test]
fn log_probabilities() {
    let logits: Vec<f32> = [1.0_f32, 4.0, 1.0, 2.0]
        .iter()
        .map(|p| p.ln() + 50.0)
        .collect();
    let found = logprobs(&logits, 2, 3).expect("computes");
    let close = |a: f32, b: f32| (a - b).abs() < 1e-5;
    assert!(close(found.token, (1.0_f32 / 8.0).ln()), "{found:?}");
    assert_eq!(found.top.iter().map(|t| t.0).collect::<Vec<_>>(), [1, 3, 0]);
    assert!(close(found.top[0].1, 0.5_f32.ln()));
    assert_eq!(logprobs(&logits, 0, 0).expect("computes").top, []);
    assert_eq!(logprobs(&logits, 0, 99).expect("computes").top.len(), 4);
}

/// The whole chain, frozen: a change here changes every text that was made with a seed.
#[test]
fn a_text_with_a_seed_stays_the_same() {
    let n_vocab = 1000;
    let mut sampler = sampler(
        SamplerParams {
            repeat_penalty: 1.1,
            dry_multiplier: 0.8,
            typical_p: 0.98,
            seed: 7,
            ..SamplerParams::default()
        },
        n_vocab,
    );
    let mut tokens = Vec::new();
    for step in 0..12_u64 {
        let logits: Vec<f32> = (0..n_vocab as u64)
            .map(|i| (random::uniform(step, i) * 8.0) as f32)
            .collect();
        let token = sampler.sample(&logits).expect("draws");
        sampler.accept(token).expect("in range");
        tokens.push(token);
    }
    assert_eq!(tokens, FROZEN);
}

const FROZEN: [u32; 12] = [986, 646, 973, 919, 326, 803, 564, 844, 215, 805, 227, 882];

#[test]
fn a_large_vocabulary_is_quick() {
    let n_vocab = 262_144;
    let logits: Vec<f32> = (0..n_vocab as u64)
        .map(|i| (random::uniform(1, i) * 20.0) as f32)
        .collect();
    let all_on = SamplerParams {
        repeat_penalty: 1.1,
        penalty_last_n: -1,
        dry_multiplier: 0.8,
        top_k: 0,
        typical_p: 0.9,
        ..SamplerParams::default()
    };
    let cases = [
        ("greedy", SamplerParams::greedy()),
        ("defaults", SamplerParams::default()),
        (
            "top-p alone",
            SamplerParams {
                top_k: 0,
                min_p: 0.0,
                ..SamplerParams::default()
            },
        ),
        (
            "min-p alone",
            SamplerParams {
                top_k: 0,
                top_p: 1.0,
                ..SamplerParams::default()
            },
        ),
        ("nothing", plain()),
        ("all", all_on),
    ];
    for (name, params) in cases {
        let mut sampler = sampler(params, n_vocab);
        (0..4096).for_each(|i| sampler.accept(i % 50).expect("in range"));
        sampler.sample(&logits).expect("draws");
        let start = std::time::Instant::now();
        for _ in 0..10 {
            sampler.sample(&logits).expect("draws");
        }
        println!("{name}: {:?} a token", start.elapsed() / 10);
        assert!(
            start.elapsed().as_secs() < 5,
            "{name}: {:?}",
            start.elapsed()
        );
    }
}

proptest! {
    #[test]
    fn the_same_inputs_give_the_same_token(
        logits in proptest::collection::vec(prop_oneof![-20.0_f32..20.0, Just(f32::NEG_INFINITY), Just(1.0)], 1..200),
        accepted in proptest::collection::vec(any::<prop::sample::Index>(), 0..30),
        top_k in 0_u32..50, top_p in 0.0_f32..=1.0, min_p in 0.0_f32..=1.0, typical_p in 0.0_f32..=1.0,
        temperature in 0.0_f32..2.0, repeat_penalty in 0.5_f32..2.0, dry_multiplier in 0.0_f32..2.0, seed in any::<u64>(),
    ) {
        let n_vocab = logits.len();
        let params = SamplerParams { top_k, top_p, min_p, typical_p, temperature, repeat_penalty, dry_multiplier, seed, ..plain() };
        let mut first = sampler(params.clone(), n_vocab);
        // A used sampler, whose memory another text has filled.
        let mut second = sampler(params, n_vocab);
        second.accept(0).expect("in range");
        let _ = second.sample(&vec![0.0; n_vocab]);
        second.reset();
        for index in accepted {
            let token = index.index(n_vocab) as u32;
            first.accept(token).expect("in range");
            second.accept(token).expect("in range");
        }
        let token = first.sample(&logits);
        prop_assert_eq!(&token, &second.sample(&logits));
        prop_assert_eq!(&token, &first.sample(&logits));
        match token {
            Ok(token) => prop_assert!(logits[token as usize] > f32::NEG_INFINITY),
            Err(error) => prop_assert!(error == SamplerError::NothingLeft && logits.iter().all(|&x| x == f32::NEG_INFINITY)),
        }
    }
}
