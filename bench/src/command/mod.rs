//! The commands of `homing-bench`.

pub(crate) mod proxy;
pub(crate) mod replica;
pub(crate) mod simulate;
