//! Every size of a cache that another engine printed, to the digits that it printed.

mod common;

use common::{Header, MIB, cache};
use place::bytes::{KvType, Streams, kv_bytes};

/// Heads as (key heads, K values, V values) behind the numbers of values that the table has.
const HEADS: [(u64, u64, (u64, u64, u64)); 10] = [
    (1024, 1024, (8, 128, 128)),
    (2048, 2048, (16, 128, 128)),
    (5120, 5120, (40, 128, 128)),
    (512, 512, (4, 128, 128)),
    (640, 640, (5, 128, 128)),
    (256, 256, (2, 128, 128)),
    (576, 512, (1, 576, 512)),
    (24_576, 16_384, (128, 192, 128)),
    (12_288, 8192, (64, 192, 128)),
    (3072, 2048, (16, 192, 128)),
];

fn header(layers: u64, k_elems: u64, v_elems: u64) -> Header {
    if v_elems == 0 {
        assert_eq!(k_elems, 576, "the only latent cache of the table");
        return Header::new("deepseek2", layers)
            .heads(128, 1, 576, 512)
            .with("attention.key_length_mla", 192)
            .with("attention.value_length_mla", 128)
            .with("attention.kv_lora_rank", 512)
            .with("rope.dimension_count", 64);
    }
    let same = |(k, v, _): &&(u64, u64, _)| (*k, *v) == (k_elems, v_elems);
    let (_, _, (heads, head_k, head_v)) = HEADS.iter().find(same).unwrap();
    Header::new("llama", layers).heads(*heads, *heads, *head_k, *head_v)
}

#[test]
fn every_printed_size() {
    let table = include_str!("data/kv_sizes.tsv");
    let mut rows = 0;
    for line in table.lines().filter(|line| line.starts_with('T')) {
        let row: Vec<&str> = line.split('\t').collect();
        let number = |i: usize| row[i].parse::<u64>().unwrap();
        let (id, layers, k_elems, v_elems, cells) =
            (row[0], number(2), number(3), number(4), number(5));
        let (type_k, type_v): (KvType, KvType) = (row[6].parse().unwrap(), row[7].parse().unwrap());
        let logged: f64 = row[8].parse().unwrap();

        let mut header = header(layers, k_elems, v_elems);
        let mut cache = cache(cells, 1, type_k, type_v, 512);
        match id {
            // The windowed part: the cells are those of a ring of 1024 and 512.
            "T34" => {
                header = Header::new("gemma4", layers)
                    .heads(16, 8, 512, 512)
                    .with("attention.key_length_swa", 256)
                    .with("attention.value_length_swa", 256)
                    .with("attention.sliding_window", 1024)
                    .flags(
                        "attention.sliding_window_pattern",
                        vec![true; layers as usize],
                    );
                cache.n_ctx = 262_144;
            }
            // Two streams, each with half the cells.
            "T62" => {
                cache.n_seq = 2;
                cache.streams = Streams::Own;
            }
            _ => {}
        }
        let bytes = kv_bytes(&header.model(), &cache).unwrap();
        let mib = bytes.total as f64 / MIB;
        assert!(
            (mib - logged).abs() <= 0.005 + 1e-9,
            "{id} {}: {mib} MiB, logged {logged}",
            row[1]
        );
        assert_eq!(bytes.total, bytes.k + bytes.v, "{id}");
        let per_cell = bytes.total / layers / cells;
        let values = type_k.row_bytes(k_elems).unwrap() + type_v.row_bytes(v_elems).unwrap();
        assert_eq!(per_cell, values, "{id}");
        rows += 1;
    }
    assert_eq!(rows, 34);
}
