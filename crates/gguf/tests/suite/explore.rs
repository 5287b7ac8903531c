//! What must hold for any bytes at all. Used by the mutation tests and by the fuzzer.

use gguf::write::Writer;
use gguf::{Header, TensorInfo};

/// Reads a header from bytes. If it is accepted, checks everything that a reader relies on.
pub fn explore(bytes: &[u8]) {
    let Ok(header) = Header::parse(bytes) else {
        return;
    };
    check_tensors(&header, bytes.len() as u64);
    check_metadata(&header);
}

fn check_tensors(header: &Header, file_bytes: u64) {
    let alignment = u64::from(header.alignment);
    assert!(header.alignment.is_power_of_two());
    assert!(header.data_start.is_multiple_of(alignment));
    assert!(
        header.data_start < file_bytes + alignment,
        "the header ends in the file"
    );
    for tensor in &header.tensors {
        let n_blocks = tensor.n_elements() / tensor.ty.block_len() as u64;
        assert_eq!(tensor.n_bytes(), n_blocks * tensor.ty.block_bytes() as u64);
        assert_eq!(tensor.n_rows() * tensor.row_len(), tensor.n_elements());
        assert_eq!(tensor.n_rows() * tensor.row_bytes(), tensor.n_bytes());
        assert!(tensor.offset >= header.data_start);
        assert!((tensor.offset - header.data_start).is_multiple_of(alignment));
        assert!(tensor.offset + tensor.n_bytes() <= i64::MAX as u64);
        let again = TensorInfo::new(&tensor.name, tensor.ty, tensor.dims.as_slice()).unwrap();
        assert_eq!(
            (again.dims, again.n_bytes()),
            (tensor.dims, tensor.n_bytes())
        );
    }
    let mut by_offset: Vec<&TensorInfo> = header.tensors.iter().collect();
    by_offset.sort_by_key(|tensor| tensor.offset);
    for pair in by_offset.windows(2) {
        assert!(
            pair[0].offset + pair[0].n_bytes() <= pair[1].offset,
            "tensors share bytes"
        );
    }
    let mut names: Vec<&str> = header.tensors.iter().map(|t| t.name.as_str()).collect();
    names.sort_unstable();
    assert!(names.windows(2).all(|pair| pair[0] != pair[1]));
}

fn check_metadata(header: &Header) {
    let metadata = &header.metadata;
    for (key, value) in metadata.iter() {
        // By address: floats may be NaN.
        assert!(std::ptr::eq(metadata.get(key).unwrap(), value));
        // Each asks for another type, and at most one of each kind can be right.
        let scalars = [
            metadata.u64(key).is_ok(),
            metadata.f32(key).is_ok(),
            metadata.bool(key).is_ok(),
            metadata.str(key).is_ok(),
            metadata.strings(key).is_ok(),
            metadata.ints(key).is_ok(),
            metadata.floats(key).is_ok(),
            metadata.bools(key).is_ok(),
        ];
        assert!(scalars.iter().filter(|&&ok| ok).count() <= 1, "{key}");
        if let Ok(Some(strings)) = metadata.strings(key) {
            let by_index = (0..strings.len()).map(|i| strings.get(i).unwrap());
            assert!(strings.iter().eq(by_index));
            assert!(strings.get(strings.len()).is_none());
        }
    }
    // Bytes are compared, not values: floats may be NaN.
    let written = write_keys(header);
    let again = Header::parse(&written).expect("what was written can be read");
    assert_eq!(written, write_keys(&again));
}

fn write_keys(header: &Header) -> Vec<u8> {
    let mut writer = Writer::new(header.alignment).unwrap();
    writer.set_all(&header.metadata);
    let mut bytes = Vec::new();
    writer
        .write_to(&mut bytes)
        .expect("what was read can be written");
    bytes
}
