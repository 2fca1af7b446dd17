//! The routing decision of Homing.
pub mod replica;
pub mod sync;
#[cfg(test)]
mod testing;
