// Written by `xtask ptx`.
const ALL: &[Compiled] = compiled! {};
