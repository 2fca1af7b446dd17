//! Where Envoy enters the module: configuration, ticks and new streams.

use core::cell::RefCell;
use std::rc::Rc;

use homing_routing::control::Control;
use homing_routing::router::Router;
use proxy_wasm::traits::{Context, HttpContext, RootContext};
use proxy_wasm::types::{ContextType, LogLevel};

use crate::config::{self, Role};
use crate::control::{ControlPlane, ControlStream};
use crate::envoy::Envoy;
use crate::model::{ModelStream, Models};
use crate::route::{Line, RouteStream, Routes, TICK_MS};

proxy_wasm::main! {{
    proxy_wasm::set_log_level(LogLevel::Info);
    proxy_wasm::set_root_context(|context| Box::new(Root { context, role: Configured::No }));
}}

/// One configured instance of the filter on one thread.
struct Root {
    /// Envoy's number for it.
    context: u32,
    role: Configured,
}

enum Configured {
    No,
    Route(Rc<Routes>),
    Control(Rc<ControlPlane>),
    Model(Rc<Models>),
}

/// A stream that arrived before a valid configuration; Envoy sends none.
struct PassStream;

impl Context for PassStream {}
impl HttpContext for PassStream {}

impl Context for Root {}

impl RootContext for Root {
    fn on_configure(&mut self, _size: usize) -> bool {
        match configured(self.context) {
            Ok(role) => {
                self.role = role;
                true
            }
            Err(error) => {
                log::error!("homing: {error}");
                false
            }
        }
    }

    fn on_tick(&mut self) {
        if let Configured::Route(routes) = &self.role {
            routes.tick();
        }
    }

    fn create_http_context(&self, context: u32) -> Option<Box<dyn HttpContext>> {
        Some(match &self.role {
            Configured::No => Box::new(PassStream),
            Configured::Route(routes) => Box::new(RouteStream::new(Rc::clone(routes), context)),
            Configured::Control(plane) => Box::new(ControlStream::new(Rc::clone(plane))),
            Configured::Model(models) => Box::new(ModelStream::new(Rc::clone(models))),
        })
    }

    fn get_type(&self) -> Option<ContextType> {
        Some(ContextType::HttpContext)
    }
}

fn configured(context: u32) -> Result<Configured, Box<dyn core::error::Error>> {
    let version = env!("CARGO_PKG_VERSION");
    match config::read(&Envoy.configuration()?)? {
        Role::Route(config) => {
            let pools: Vec<_> = config.policies.iter().map(|policy| policy.cluster.clone()).collect();
            let router = Router::new(Envoy, config.settings, config.policies)?;
            let table_kib = router.table().bytes() / 1024;
            Envoy.set_tick_period(TICK_MS)?;
            log::info!("homing {version}: routes {}; affinity table of {table_kib} KiB", pools.join(", "));
            Ok(Configured::Route(Rc::new(Routes {
                router: RefCell::new(router),
                debug_headers: config.debug_headers,
                max_body_bytes: config.max_body_bytes,
                serves: false.into(),
                line: Line::new(context, TICK_MS),
                signed_in_ms: 0.into(),
            })))
        }
        Role::Model(config) => {
            log::info!("homing {version}: copies the model of a body into {}", config.header);
            Ok(Configured::Model(Rc::new(Models::new(config)?)))
        }
        Role::Control(config) => {
            log::info!("homing {version}: takes snapshots{}", if config.token.is_empty() { " without a token" } else { "" });
            Ok(Configured::Control(Rc::new(ControlPlane { control: RefCell::new(Control::new(Envoy)), token: config.token })))
        }
    }
}
