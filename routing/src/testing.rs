//! What the tests of this crate share.

/// `#[test]` on the host and under Node: the same tests run where pointers are 64 and 32 bits wide.
#[cfg(not(target_arch = "wasm32"))]
pub(crate) use core::prelude::v1::test;
#[cfg(target_arch = "wasm32")]
pub(crate) use wasm_bindgen_test::wasm_bindgen_test as test;
