//! What Homing is measured with, since a prefix cache's effect shows only on engines that have one and a GPU is not at every desk.
//!
//! - [`engine`]: a model of one vLLM engine, step by step: pure, without I/O and without a clock of its own.
//! - [`balancer`]: how vLLM itself chooses among the data-parallel ranks behind one port.
//! - [`replica`]: the stand-in replica: the engine in real time behind vLLM's HTTP endpoints and metrics.
//! - [`workload`]: what agents send, as data, for the load generator and the simulator.
//! - [`load`]: a load generator that drives an OpenAI or Anthropic endpoint with agent sessions and reports what they saw.
//! - [`report`]: tables and figures of several such runs.
//! - [`simulate`]: the engine in virtual time: agent sessions under one policy or another, minutes in a second.
//! - [`proxy`]: what a filter costs in a proxy, beside the same proxy without it.
//! - [`text`]: how text becomes tokens here, and the generated text that both sides use.
#![forbid(unsafe_code)]

pub mod balancer;
pub mod engine;
pub mod load;
pub mod proxy;
pub mod replica;
pub mod report;
pub mod simulate;
pub mod text;
pub mod workload;
