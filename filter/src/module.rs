//! Envoy's way into the module: what it exports of the proxy-wasm ABI 0.2.1.
//!
//! Envoy calls whatever a module exports, for every stream and for every piece of a body, and each call costs it one to two
//! microseconds even if nothing is done there. The SDK exports everything, so the module exports by itself what a role has a use for:
//! nothing that is called for each piece of a response, and one call at a stream's end where Envoy offers three.

use core::cell::RefCell;

use hashbrown::HashMap;

use crate::root::Root;

/// What Envoy does with a stream after a callback.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Action {
    /// Goes on with it.
    Continue = 0,
    /// Waits for the rest of the body, for a resumption, or until it is answered.
    Pause = 1,
}

/// One request and its response.
pub(crate) trait Stream {
    /// The request's headers have come; nothing follows them at the `end_of_stream`.
    fn on_request_headers(&mut self, end_of_stream: bool) -> Action;

    /// A piece of the request's body has come. While the stream is paused, `size` is that of all that has come.
    fn on_request_body(&mut self, size: usize, end_of_stream: bool) -> Action;

    /// Trailers have come, with which the request ends.
    fn on_request_trailers(&mut self) -> Action;

    /// The response's headers have come.
    fn on_response_headers(&mut self) {}

    /// The stream has ended, in whatever way. Only metrics and shared data can still be reached.
    fn on_end(&mut self) {}
}

#[derive(Default)]
struct Contexts {
    roots: RefCell<HashMap<u32, Root>>,
    streams: RefCell<HashMap<u32, Box<dyn Stream>>>,
}

thread_local! {
    // A VM has one thread.
    static CONTEXTS: Contexts = Contexts::default();
}

fn with_root<T>(id: u32, call: impl FnOnce(&mut Root) -> T) -> Option<T> {
    CONTEXTS.with(|contexts| contexts.roots.try_borrow_mut().ok()?.get_mut(&id).map(call))
}

fn with_stream<T>(id: u32, call: impl FnOnce(&mut dyn Stream) -> T) -> Option<T> {
    CONTEXTS.with(|contexts| contexts.streams.try_borrow_mut().ok()?.get_mut(&id).map(|stream| call(stream.as_mut())))
}

/// A callback for a stream that is not known lets it pass.
fn decide(id: u32, call: impl FnOnce(&mut dyn Stream) -> Action) -> Action {
    with_stream(id, call).unwrap_or(Action::Continue)
}

unsafe extern "C" {
    fn __wasm_call_ctors();
}

/// Without it, the linker makes every export run the constructors.
#[unsafe(no_mangle)]
extern "C" fn _initialize() {
    // SAFETY: the linker makes this function, to be called once, before anything else.
    unsafe { __wasm_call_ctors() };
}

#[unsafe(no_mangle)]
extern "C" fn proxy_abi_version_0_2_1() {}

/// Memory for a buffer that Envoy hands over; `envoy::buffer` takes it.
#[unsafe(no_mangle)]
extern "C" fn proxy_on_memory_allocate(size: usize) -> *mut u8 {
    Box::into_raw(Box::<[u8]>::new_uninit_slice(size)).cast()
}

#[unsafe(no_mangle)]
extern "C" fn proxy_on_context_create(id: u32, root: u32) {
    CONTEXTS.with(|contexts| {
        if root == 0 {
            if let Ok(mut roots) = contexts.roots.try_borrow_mut() {
                roots.insert(id, Root::new(id));
            }
        } else if let Some(stream) = with_root(root, |root| root.stream(id)).flatten()
            && let Ok(mut streams) = contexts.streams.try_borrow_mut()
        {
            streams.insert(id, stream);
        }
    });
}

#[unsafe(no_mangle)]
extern "C" fn proxy_on_configure(root: u32, _size: usize) -> bool {
    with_root(root, Root::on_configure).unwrap_or(false)
}

#[unsafe(no_mangle)]
extern "C" fn proxy_on_tick(root: u32) {
    with_root(root, |root| root.on_tick());
}

#[unsafe(no_mangle)]
extern "C" fn proxy_on_request_headers(id: u32, _count: usize, end_of_stream: bool) -> Action {
    decide(id, |stream| stream.on_request_headers(end_of_stream))
}

#[unsafe(no_mangle)]
extern "C" fn proxy_on_request_body(id: u32, size: usize, end_of_stream: bool) -> Action {
    decide(id, |stream| stream.on_request_body(size, end_of_stream))
}

#[unsafe(no_mangle)]
extern "C" fn proxy_on_request_trailers(id: u32, _count: usize) -> Action {
    decide(id, |stream| stream.on_request_trailers())
}

#[unsafe(no_mangle)]
extern "C" fn proxy_on_response_headers(id: u32, _count: usize, _end_of_stream: bool) -> Action {
    decide(id, |stream| {
        stream.on_response_headers();
        Action::Continue
    })
}

#[unsafe(no_mangle)]
extern "C" fn proxy_on_delete(id: u32) {
    CONTEXTS.with(|contexts| {
        let ended = contexts.streams.try_borrow_mut().ok().and_then(|mut streams| streams.remove(&id));
        match ended {
            Some(mut stream) => stream.on_end(),
            None => drop(contexts.roots.try_borrow_mut().ok().and_then(|mut roots| roots.remove(&id))),
        }
    });
}
