//! What agents send: one description for the simulator, which runs it in virtual time, and for the load generator, which sends it.
//!
//! - [`SessionPlan`]: one session as plain data: when it comes, what it is called, and its steps. Texts are a seed and a length, so a
//!   plan is small however long its contexts are.
//! - [`Workload`]: a kind of load and a seed, or a trace. [`Workload::sessions`] gives its plans one after the other, the same every time.
//! - [`Session`]: a plan as it is carried out. It holds the history, says what comes next, and takes answers in.
//! - [`trace`]: plans as a file, a JSON object a line. [`mooncake`]: the public traces of Mooncake as plans.
//!
//! Time is the engines': whoever runs engines faster than real time divides by the speed.

mod args;
mod kinds;
pub mod mooncake;
mod plan;
mod session;
pub mod trace;

pub use args::{WorkloadArgs, WorkloadName};
pub use kinds::{Kind, SessionShape, Sessions, Workload};
pub use plan::{Call, SessionPlan, Step, Text};
pub use session::{CallKind, Ending, Message, Next, NextCall, Session};
