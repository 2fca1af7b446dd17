//! One configured instance of the filter on one thread: its configuration, its ticks and its streams.

use core::cell::RefCell;
use std::rc::Rc;

use homing_routing::control::Control;
use homing_routing::router::Router;

use crate::config::{self, Role};
use crate::control::{ControlPlane, ControlStream};
use crate::envoy::{Envoy, LogLevel};
use crate::model::{ModelStream, Models};
use crate::module::Stream;
use crate::route::{Line, RouteStream, Routes, TICK_MS};

/// One configured instance of the filter on one thread.
pub(crate) struct Root {
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

impl Root {
    pub(crate) fn new(context: u32) -> Self {
        Self { context, role: Configured::No }
    }

    /// Reads the configuration; says whether it is valid.
    pub(crate) fn on_configure(&mut self) -> bool {
        match configured(self.context) {
            Ok(role) => {
                self.role = role;
                true
            }
            Err(error) => {
                Envoy.log(LogLevel::Error, &format!("homing: {error}"));
                false
            }
        }
    }

    pub(crate) fn on_tick(&self) {
        if let Configured::Route(routes) = &self.role {
            routes.tick();
        }
    }

    /// A new stream. `None` before there is a valid configuration, when Envoy sends none.
    pub(crate) fn stream(&self, context: u32) -> Option<Box<dyn Stream>> {
        Some(match &self.role {
            Configured::No => return None,
            Configured::Route(routes) => Box::new(RouteStream::new(Rc::clone(routes), context)),
            Configured::Control(plane) => Box::new(ControlStream::new(Rc::clone(plane))),
            Configured::Model(models) => Box::new(ModelStream::new(Rc::clone(models))),
        })
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
            let pools = pools.join(", ");
            Envoy.log(LogLevel::Info, &format!("homing {version}: routes {pools}; affinity table of {table_kib} KiB"));
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
            Envoy.log(LogLevel::Info, &format!("homing {version}: copies the model of a body into {}", config.header));
            Ok(Configured::Model(Rc::new(Models::new(config)?)))
        }
        Role::Control(config) => {
            let how = if config.token.is_empty() { " without a token" } else { "" };
            Envoy.log(LogLevel::Info, &format!("homing {version}: takes snapshots{how}"));
            Ok(Configured::Control(Rc::new(ControlPlane { control: RefCell::new(Control::new(Envoy)), token: config.token })))
        }
    }
}
