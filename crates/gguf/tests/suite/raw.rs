//! Builds files byte by byte, also those that the writer refuses to write.

/// Types of metadata values, by their numbers in files.
pub mod value_type {
    pub const U8: u32 = 0;
    pub const U16: u32 = 2;
    pub const U32: u32 = 4;
    pub const I32: u32 = 5;
    pub const BOOL: u32 = 7;
    pub const STRING: u32 = 8;
    pub const ARRAY: u32 = 9;
    pub const U64: u32 = 10;
    pub const F64: u32 = 12;
}

/// Types of tensors, by their numbers in files.
pub mod tensor_type {
    pub const F32: u32 = 0;
    pub const Q4_K: u32 = 12;
    pub const F64: u32 = 28;
}

/// The bytes of a file so far.
#[derive(Clone, Default)]
pub struct Raw(pub Vec<u8>);

impl Raw {
    /// A header of version 3 with these counts.
    pub fn new(n_tensors: u64, n_keys: u64) -> Raw {
        Raw::default()
            .bytes(b"GGUF")
            .u32(3)
            .u64(n_tensors)
            .u64(n_keys)
    }

    pub fn bytes(mut self, bytes: &[u8]) -> Raw {
        self.0.extend_from_slice(bytes);
        self
    }

    pub fn zeros(self, n: usize) -> Raw {
        self.bytes(&vec![0; n])
    }

    pub fn u32(self, n: u32) -> Raw {
        self.bytes(&n.to_le_bytes())
    }

    pub fn u64(self, n: u64) -> Raw {
        self.bytes(&n.to_le_bytes())
    }

    /// A length and as many bytes.
    pub fn string(self, string: impl AsRef<[u8]>) -> Raw {
        let string = string.as_ref();
        self.u64(string.len() as u64).bytes(string)
    }

    /// A key and the type of its value; the value has to follow.
    pub fn key(self, key: impl AsRef<[u8]>, value_type: u32) -> Raw {
        self.string(key).u32(value_type)
    }

    pub fn key_u16(self, key: &str, n: u16) -> Raw {
        self.key(key, value_type::U16).bytes(&n.to_le_bytes())
    }

    pub fn key_u32(self, key: &str, n: u32) -> Raw {
        self.key(key, value_type::U32).u32(n)
    }

    /// A key and the head of an array; the items have to follow.
    pub fn key_array(self, key: &str, item_type: u32, count: u64) -> Raw {
        self.key(key, value_type::ARRAY).u32(item_type).u64(count)
    }

    /// A tensor's entry in the header.
    pub fn tensor(self, name: impl AsRef<[u8]>, dims: &[u64], ty: u32, offset: u64) -> Raw {
        let raw = self.string(name).u32(dims.len() as u32);
        let raw = dims.iter().fold(raw, |raw, &n| raw.u64(n));
        raw.u32(ty).u64(offset)
    }

    /// Zeros up to a multiple of `alignment`.
    pub fn pad(self, alignment: usize) -> Raw {
        let n = self.0.len().next_multiple_of(alignment) - self.0.len();
        self.zeros(n)
    }

    pub fn len(&self) -> u64 {
        self.0.len() as u64
    }
}
