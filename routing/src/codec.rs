//! Reading and writing the fixed layouts kept in shared data, without a way to panic.
//!
//! Every stored value begins with a layout number. A reader that meets another number, or fewer bytes than it needs, treats the
//! value as absent: an upgrade may find the bytes of an older or a newer filter.

/// Reads little-endian fields off the front of a slice.
pub(crate) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    /// Starts behind the layout number, if it is `layout`.
    pub(crate) fn open(bytes: &'a [u8], layout: u8) -> Option<Self> {
        let (first, rest) = bytes.split_first()?;
        (*first == layout).then_some(Self(rest))
    }

    /// Starts at the first byte.
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    #[inline]
    pub(crate) fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*head)
    }

    pub(crate) fn u8(&mut self) -> Option<u8> {
        self.array::<1>().map(|[byte]| byte)
    }

    pub(crate) fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    pub(crate) fn f32(&mut self) -> Option<f32> {
        self.array().map(f32::from_le_bytes)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Writes little-endian fields into a slice, one behind the other; what does not fit is left out.
pub(crate) struct Writer<'a>(&'a mut [u8]);

impl<'a> Writer<'a> {
    pub(crate) fn over(bytes: &'a mut [u8]) -> Self {
        Self(bytes)
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        let target = core::mem::take(&mut self.0);
        let (head, rest) = target.split_at_mut(bytes.len().min(target.len()));
        if let Some(bytes) = bytes.get(..head.len()) {
            head.copy_from_slice(bytes);
        }
        self.0 = rest;
    }

    #[inline]
    fn array<const N: usize>(&mut self, bytes: [u8; N]) {
        if let Some((head, rest)) = core::mem::take(&mut self.0).split_first_chunk_mut() {
            *head = bytes;
            self.0 = rest;
        }
    }

    pub(crate) fn u8(&mut self, value: u8) {
        self.array([value]);
    }

    pub(crate) fn u16(&mut self, value: u16) {
        self.array(value.to_le_bytes());
    }

    pub(crate) fn u32(&mut self, value: u32) {
        self.array(value.to_le_bytes());
    }

    pub(crate) fn u64(&mut self, value: u64) {
        self.array(value.to_le_bytes());
    }

    pub(crate) fn f32(&mut self, value: f32) {
        self.array(value.to_le_bytes());
    }
}
