//! Where Envoy enters the module: configuration, ticks and new streams.

use core::cell::RefCell;
use std::rc::Rc;

use homing_routing::control::Control;
use homing_routing::metric::ErrorKind;
use homing_routing::router::Router;
use proxy_wasm::traits::{Context, HttpContext, RootContext};
use proxy_wasm::types::{ContextType, LogLevel};

use crate::config::{self, Role};
use crate::control::{ControlPlane, ControlStream};
use crate::envoy::Envoy;
use crate::route::{RouteStream, Routes};

/// How often a thread looks whether it is its turn to count held conversations.
const TICK_MS: u32 = 500;

proxy_wasm::main! {{
    proxy_wasm::set_log_level(LogLevel::Info);
    proxy_wasm::set_root_context(|_| Box::new(Root::Unconfigured));
}}

/// One configured instance of the filter on one thread.
enum Root {
    Unconfigured,
    Route(Rc<Routes>),
    Control(Rc<ControlPlane>),
}

/// A stream that arrived before a valid configuration; Envoy sends none.
struct PassStream;

impl Context for PassStream {}
impl HttpContext for PassStream {}

impl Context for Root {}

impl RootContext for Root {
    fn on_configure(&mut self, _size: usize) -> bool {
        match configured() {
            Ok(root) => {
                *self = root;
                true
            }
            Err(error) => {
                log::error!("homing: {error}");
                false
            }
        }
    }

    fn on_tick(&mut self) {
        if let Self::Route(routes) = self
            && let Ok(mut router) = routes.router.try_borrow_mut()
            && router.heal().and_then(|()| router.sweep(routes.serves.get())).is_err()
        {
            router.count_error(ErrorKind::Host, 1);
        }
    }

    fn create_http_context(&self, _context_id: u32) -> Option<Box<dyn HttpContext>> {
        Some(match self {
            Self::Unconfigured => Box::new(PassStream),
            Self::Route(routes) => Box::new(RouteStream::new(Rc::clone(routes))),
            Self::Control(plane) => Box::new(ControlStream::new(Rc::clone(plane))),
        })
    }

    fn get_type(&self) -> Option<ContextType> {
        Some(ContextType::HttpContext)
    }
}

fn configured() -> Result<Root, Box<dyn core::error::Error>> {
    let version = env!("CARGO_PKG_VERSION");
    match config::read(&Envoy.configuration()?)? {
        Role::Route(config) => {
            let pools: Vec<_> = config.policies.iter().map(|policy| policy.cluster.clone()).collect();
            let router = Router::new(Envoy, config.settings, config.policies)?;
            let table_kib = router.table().bytes() / 1024;
            Envoy.set_tick_period(TICK_MS)?;
            log::info!("homing {version}: routes {}; affinity table of {table_kib} KiB", pools.join(", "));
            Ok(Root::Route(Rc::new(Routes {
                router: RefCell::new(router),
                debug_headers: config.debug_headers,
                max_body_bytes: config.max_body_bytes,
                serves: false.into(),
            })))
        }
        Role::Control(config) => {
            log::info!("homing {version}: takes snapshots{}", if config.token.is_empty() { " without a token" } else { "" });
            Ok(Root::Control(Rc::new(ControlPlane { control: RefCell::new(Control::new(Envoy)), token: config.token })))
        }
    }
}
