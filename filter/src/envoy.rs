//! Host calls to Envoy that return their errors.
//!
//! The SDK's wrappers panic on any status they do not expect, which kills the VM and every stream on its worker, and some of
//! those statuses a client can cause. So the imports the filter uses are declared here, after the proxy-wasm ABI 0.2.1.

use core::ptr::{null, null_mut};

use homing_routing::host::{Expected, Host, HostError, MetricId, Stored};
use homing_routing::metric::{Metric, MetricKind};

const OK: u32 = 0;
const NOT_FOUND: u32 = 1;
const CAS_MISMATCH: u32 = 8;

/// A version no value has: a write that expects it succeeds only if the key does not exist, since Envoy then ignores it.
const NO_VERSION: u32 = u32::MAX;

const REQUEST: u32 = 0;
const REQUEST_BODY: u32 = 0;
const PLUGIN_CONFIGURATION: u32 = 7;

/// Which headers a call means.
#[derive(Clone, Copy, Debug)]
#[repr(u32)]
pub(crate) enum Map {
    Request = 0,
    Response = 2,
}

/// How much a message in Envoy's log matters.
#[derive(Clone, Copy, Debug)]
#[repr(u32)]
pub(crate) enum LogLevel {
    Info = 2,
    Error = 4,
}

#[link(wasm_import_module = "env")]
unsafe extern "C" {
    fn proxy_log(level: u32, message: *const u8, size: usize) -> u32;
    fn proxy_get_current_time_nanoseconds(time: *mut u64) -> u32;
    fn proxy_set_tick_period_milliseconds(period: u32) -> u32;
    fn proxy_set_effective_context(context: u32) -> u32;
    fn proxy_continue_stream(stream: u32) -> u32;
    fn proxy_get_buffer_bytes(buffer: u32, start: usize, length: usize, data: *mut *mut u8, size: *mut usize) -> u32;
    fn proxy_get_header_map_pairs(map: u32, data: *mut *mut u8, size: *mut usize) -> u32;
    fn proxy_get_header_map_value(map: u32, key: *const u8, key_size: usize, data: *mut *mut u8, size: *mut usize) -> u32;
    fn proxy_replace_header_map_value(map: u32, key: *const u8, key_size: usize, value: *const u8, value_size: usize) -> u32;
    fn proxy_remove_header_map_value(map: u32, key: *const u8, key_size: usize) -> u32;
    fn proxy_get_property(path: *const u8, path_size: usize, data: *mut *mut u8, size: *mut usize) -> u32;
    fn proxy_get_shared_data(key: *const u8, key_size: usize, data: *mut *mut u8, size: *mut usize, cas: *mut u32) -> u32;
    fn proxy_set_shared_data(key: *const u8, key_size: usize, data: *const u8, size: usize, cas: u32) -> u32;
    fn proxy_define_metric(kind: u32, name: *const u8, name_size: usize, id: *mut u32) -> u32;
    fn proxy_increment_metric(id: u32, offset: i64) -> u32;
    fn proxy_record_metric(id: u32, value: u64) -> u32;
    fn proxy_get_metric(id: u32, value: *mut u64) -> u32;
    fn proxy_send_local_response(
        status: u32,
        details: *const u8,
        details_size: usize,
        body: *const u8,
        body_size: usize,
        headers: *const u8,
        headers_size: usize,
        grpc_status: i32,
    ) -> u32;
}

fn check(call: &'static str, status: u32) -> Result<(), HostError> {
    if status == OK { Ok(()) } else { Err(HostError { call, status }) }
}

/// Runs a call that hands over a buffer. `None` if the host handed over none.
fn buffer(call: &'static str, with: impl FnOnce(*mut *mut u8, *mut usize) -> u32) -> Result<Option<Vec<u8>>, HostError> {
    let (mut data, mut size) = (null_mut(), 0);
    match with(&raw mut data, &raw mut size) {
        OK if data.is_null() => Ok(None),
        // SAFETY: the host took these bytes from `proxy_on_memory_allocate`, which allocates exactly `size` of them as a boxed
        // slice, filled them and gave them away.
        OK => Ok(Some(unsafe { Vec::from_raw_parts(data, size, size) })),
        NOT_FOUND => Ok(None),
        status => Err(HostError { call, status }),
    }
}

/// Envoy, as the routing sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Envoy;

impl Host for Envoy {
    fn now_ms(&self) -> u64 {
        let mut time = 0;
        // SAFETY: `time` outlives the call. A refused call leaves 0.
        let _ = unsafe { proxy_get_current_time_nanoseconds(&raw mut time) };
        time / 1_000_000
    }

    fn read(&self, key: &str) -> Result<Option<Stored>, HostError> {
        let mut version = 0;
        let bytes = buffer("get_shared_data", |data, size| {
            // SAFETY: the key and every place written to outlive the call.
            unsafe { proxy_get_shared_data(key.as_ptr(), key.len(), data, size, &raw mut version) }
        })?;
        Ok(bytes.map(|bytes| Stored { bytes, version }))
    }

    fn write(&self, key: &str, value: &[u8], expected: Expected) -> Result<bool, HostError> {
        let cas = match expected {
            Expected::Anything => 0,
            Expected::Absent => NO_VERSION,
            Expected::Version(version) => version,
        };
        // SAFETY: key and value outlive the call.
        match unsafe { proxy_set_shared_data(key.as_ptr(), key.len(), value.as_ptr(), value.len(), cas) } {
            OK => Ok(true),
            CAS_MISMATCH => Ok(false),
            status => Err(HostError { call: "set_shared_data", status }),
        }
    }

    fn define(&self, metric: &Metric<'_>) -> Result<MetricId, HostError> {
        let kind = match metric.kind() {
            MetricKind::Counter => 0,
            MetricKind::Gauge => 1,
        };
        let (name, mut id) = (metric.to_string(), 0);
        // SAFETY: name and id outlive the call.
        check("define_metric", unsafe { proxy_define_metric(kind, name.as_ptr(), name.len(), &raw mut id) })?;
        Ok(MetricId(id))
    }

    fn add(&self, metric: MetricId, amount: i64) -> Result<(), HostError> {
        // SAFETY: no memory is shared.
        check("increment_metric", unsafe { proxy_increment_metric(metric.0, amount) })
    }

    fn set(&self, metric: MetricId, value: u64) -> Result<(), HostError> {
        // SAFETY: no memory is shared.
        check("record_metric", unsafe { proxy_record_metric(metric.0, value) })
    }

    fn value(&self, metric: MetricId) -> Result<u64, HostError> {
        let mut value = 0;
        // SAFETY: `value` outlives the call.
        check("get_metric", unsafe { proxy_get_metric(metric.0, &raw mut value) })?;
        Ok(value)
    }
}

impl Envoy {
    /// Writes a line into Envoy's log.
    pub(crate) fn log(self, level: LogLevel, message: &str) {
        // SAFETY: the message outlives the call. Nothing is left to tell of a refused one.
        let _ = unsafe { proxy_log(level as u32, message.as_ptr(), message.len()) };
    }

    /// The plugin's configuration.
    pub(crate) fn configuration(self) -> Result<Vec<u8>, HostError> {
        let bytes = buffer("get_buffer_bytes", |data, size| {
            // SAFETY: every place written to outlives the call.
            unsafe { proxy_get_buffer_bytes(PLUGIN_CONFIGURATION, 0, usize::MAX, data, size) }
        })?;
        Ok(bytes.unwrap_or_default())
    }

    /// The first `size` bytes of the request body that Envoy has buffered.
    pub(crate) fn body(self, size: usize) -> Result<Vec<u8>, HostError> {
        let bytes = buffer("get_buffer_bytes", |data, length| {
            // SAFETY: every place written to outlives the call.
            unsafe { proxy_get_buffer_bytes(REQUEST_BODY, 0, size, data, length) }
        })?;
        Ok(bytes.unwrap_or_default())
    }

    pub(crate) fn set_tick_period(self, ms: u32) -> Result<(), HostError> {
        // SAFETY: no memory is shared.
        check("set_tick_period", unsafe { proxy_set_tick_period_milliseconds(ms) })
    }

    /// Makes the calls that follow in this callback those of another context.
    pub(crate) fn set_effective_context(self, context: u32) -> Result<(), HostError> {
        // SAFETY: no memory is shared.
        check("set_effective_context", unsafe { proxy_set_effective_context(context) })
    }

    /// Goes on with a request that was paused, once this callback has ended.
    pub(crate) fn resume_request(self) -> Result<(), HostError> {
        // SAFETY: no memory is shared.
        check("continue_stream", unsafe { proxy_continue_stream(REQUEST) })
    }

    /// Every request header, in one call.
    pub(crate) fn request_headers(self) -> Result<Headers, HostError> {
        let bytes = buffer("get_header_map_pairs", |data, size| {
            // SAFETY: every place written to outlives the call.
            unsafe { proxy_get_header_map_pairs(Map::Request as u32, data, size) }
        })?;
        Ok(Headers(bytes.unwrap_or_default()))
    }

    pub(crate) fn header(self, map: Map, name: &str) -> Result<Option<Vec<u8>>, HostError> {
        buffer("get_header_map_value", |data, size| {
            // SAFETY: the name and every place written to outlive the call.
            unsafe { proxy_get_header_map_value(map as u32, name.as_ptr(), name.len(), data, size) }
        })
    }

    pub(crate) fn set_header(self, map: Map, name: &str, value: &str) -> Result<(), HostError> {
        // SAFETY: name and value outlive the call.
        check("replace_header_map_value", unsafe {
            proxy_replace_header_map_value(map as u32, name.as_ptr(), name.len(), value.as_ptr(), value.len())
        })
    }

    pub(crate) fn remove_header(self, map: Map, name: &str) -> Result<(), HostError> {
        // SAFETY: the name outlives the call.
        check("remove_header_map_value", unsafe { proxy_remove_header_map_value(map as u32, name.as_ptr(), name.len()) })
    }

    /// A property by its path, whose parts are separated by NUL. `None` if it has no value in this phase.
    pub(crate) fn property(self, path: &str) -> Result<Option<Vec<u8>>, HostError> {
        buffer("get_property", |data, size| {
            // SAFETY: the path and every place written to outlive the call.
            unsafe { proxy_get_property(path.as_ptr(), path.len(), data, size) }
        })
    }

    /// Answers the request in the replicas' place, with JSON.
    pub(crate) fn respond(self, status: u32, details: &str, headers: &[(&str, &str)], body: &[u8]) -> Result<(), HostError> {
        let headers = pairs(&[&[("content-type", "application/json")], headers].concat());
        // SAFETY: everything passed outlives the call; -1 means no gRPC status.
        check("send_local_response", unsafe {
            proxy_send_local_response(
                status,
                details.as_ptr(),
                details.len(),
                if body.is_empty() { null() } else { body.as_ptr() },
                body.len(),
                headers.as_ptr(),
                headers.len(),
                -1,
            )
        })
    }
}

/// Headers as Envoy hands them over: their number, the sizes of every name and value, then each followed by NUL.
#[derive(Debug)]
pub(crate) struct Headers(Vec<u8>);

impl Headers {
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        let (count, rest) = self.0.split_first_chunk().map_or((0, &[][..]), |(count, rest)| (u32::from_le_bytes(*count), rest));
        let sizes_length = (count as usize).saturating_mul(8).min(rest.len());
        let (sizes, mut text) = rest.split_at(sizes_length);
        let mut take = move |size: &[u8; 4]| {
            let size = u32::from_le_bytes(*size) as usize;
            let part = text.get(..size)?;
            text = text.get(size.saturating_add(1)..).unwrap_or_default();
            Some(part)
        };
        sizes.as_chunks::<4>().0.as_chunks::<2>().0.iter().map_while(move |[name, value]| Some((take(name)?, take(value)?)))
    }
}

fn pairs(headers: &[(&str, &str)]) -> Vec<u8> {
    let size = |text: &str| u32::try_from(text.len()).unwrap_or(0).to_le_bytes();
    let mut bytes = u32::try_from(headers.len()).unwrap_or(0).to_le_bytes().to_vec();
    for (name, value) in headers {
        bytes.extend_from_slice(&size(name));
        bytes.extend_from_slice(&size(value));
    }
    for part in headers.iter().flat_map(|(name, value)| [name, value]) {
        bytes.extend_from_slice(part.as_bytes());
        bytes.push(0);
    }
    bytes
}
