//! What was measured, as figures and as a table.

use super::aims::{self, Aim};
use super::{Case, Homes, IdPlace, Load, ProxyConfig, Subject};
use serde::Serialize;
use std::fmt;
use std::time::Duration;

/// One subject in one round, or the medians of all rounds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Figures {
    /// Requests answered in a second.
    pub requests_per_s: f64,
    /// Half of the requests took no longer.
    pub p50_us: f64,
    /// 99 of 100 requests took no longer.
    pub p99_us: f64,
    /// The CPU time for a request, of the proxy and of the subject's helper.
    pub cpu_us: f64,
    /// How much of it is the helper's; 0 for a subject that has none.
    pub helper_cpu_us: f64,
    /// The CPUs that both kept busy. Below about 1 for one worker, requests per second say more of the machine than of the proxy.
    pub cpus_busy: f64,
}

impl Figures {
    pub(super) fn new(load: &Load, proxy: Duration, helper: Duration) -> Self {
        let cpu = proxy + helper;
        let (requests, elapsed_s) = (load.requests() as f64, load.elapsed.as_secs_f64());
        Self {
            requests_per_s: requests / elapsed_s,
            p50_us: load.latencies_us.value_at_quantile(0.5) as f64,
            p99_us: load.latencies_us.value_at_quantile(0.99) as f64,
            cpu_us: cpu.as_secs_f64() * 1e6 / requests,
            helper_cpu_us: helper.as_secs_f64() * 1e6 / requests,
            cpus_busy: cpu.as_secs_f64() / elapsed_s,
        }
    }

    fn medians(rounds: &[Self]) -> Self {
        let median = |figure: fn(&Self) -> f64| Spread::of(rounds.iter().map(figure)).median;
        Self {
            requests_per_s: median(|round| round.requests_per_s),
            p50_us: median(|round| round.p50_us),
            p99_us: median(|round| round.p99_us),
            cpu_us: median(|round| round.cpu_us),
            helper_cpu_us: median(|round| round.helper_cpu_us),
            cpus_busy: median(|round| round.cpus_busy),
        }
    }
}

/// A figure over all rounds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// The median.
    pub median: f64,
    /// The lowest.
    pub min: f64,
    /// The highest.
    pub max: f64,
}

impl Spread {
    /// Not a number if there are no values.
    pub(super) fn of(values: impl Iterator<Item = f64>) -> Self {
        let mut sorted: Vec<_> = values.collect();
        sorted.sort_by(f64::total_cmp);
        let at = |index: usize| sorted.get(index).copied().unwrap_or(f64::NAN);
        let last = sorted.len().saturating_sub(1);
        Self { median: f64::midpoint(at(last / 2), at(last.div_ceil(2))), min: at(0), max: at(last) }
    }
}

/// A subject beside the first one: the quotients of each round's figures.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Ratios {
    /// Of requests per second.
    pub requests_per_s: Spread,
    /// Of the median latency.
    pub p50: Spread,
    /// Of the 99th percentile of latency.
    pub p99: Spread,
    /// Of the CPU time for a request.
    pub cpu: Spread,
    /// How much longer a request keeps the CPU, in microseconds: a difference, not a quotient.
    pub cpu_more_us: Spread,
}

impl Ratios {
    fn new(rounds: &[Figures], base: &[Figures]) -> Self {
        let spread = |of: fn(&Figures, &Figures) -> f64| Spread::of(rounds.iter().zip(base).map(|(own, base)| of(own, base)));
        Self {
            requests_per_s: spread(|own, base| own.requests_per_s / base.requests_per_s),
            p50: spread(|own, base| own.p50_us / base.p50_us),
            p99: spread(|own, base| own.p99_us / base.p99_us),
            cpu: spread(|own, base| own.cpu_us / base.cpu_us),
            cpu_more_us: spread(|own, base| own.cpu_us - base.cpu_us),
        }
    }
}

/// One subject in one case.
#[derive(Clone, Debug, Serialize)]
pub struct SubjectReport {
    /// What it is called.
    pub name: String,
    /// Its figures: the median of each over all rounds.
    pub figures: Figures,
    /// The least CPU time for a request in any round. What else the machine does only adds to it, so that it varies least.
    pub lowest_cpu_us: f64,
    /// Beside the first subject; the first one has none.
    pub ratios: Option<Ratios>,
}

/// One case.
#[derive(Clone, Debug, Serialize)]
pub struct CaseReport {
    /// The size of the body.
    pub body_bytes: usize,
    /// Where the conversation is named: `header` or `body`.
    pub id: String,
    /// Every subject that takes such requests.
    pub subjects: Vec<SubjectReport>,
}

/// A subject's own check that it did what it is measured for.
#[derive(Clone, Debug, Serialize)]
pub struct HomesReport {
    /// The subject.
    pub subject: String,
    /// Conversations that had a request.
    pub conversations: u64,
    /// Upstreams that served them, each conversation the same one all the time.
    pub upstreams: usize,
}

/// Everything that was measured.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The machine's CPUs.
    pub cpus: usize,
    /// The proxy's workers.
    pub workers: usize,
    /// How often each case went to each subject.
    pub rounds: usize,
    /// How long each time, in seconds.
    pub seconds: f64,
    /// Connections at once.
    pub connections: u32,
    /// Conversations the requests belonged to.
    pub conversations: u32,
    /// The CPUs the proxy keeps busy when nothing is sent.
    pub idle_cpus_busy: f64,
    /// Every case.
    pub cases: Vec<CaseReport>,
    /// The subjects that had to keep conversations where they were first, and did.
    pub homes: Vec<HomesReport>,
    /// What the measurement is for, of the subjects and sizes that were measured.
    pub aims: Vec<Aim>,
}

impl Report {
    /// The figures are by case, subject and round, and there are none where a subject does not take a case.
    pub(super) fn new(config: &ProxyConfig, idle_cpus_busy: f64, figures: &[Vec<Vec<Figures>>], homes: &[Homes]) -> Self {
        let subjects = |by_subject: &Vec<Vec<Figures>>| {
            let measured = config.subjects.iter().zip(by_subject).enumerate().filter(|(_, (_, rounds))| !rounds.is_empty());
            let report = |(index, (subject, rounds)): (usize, (&Subject, &Vec<Figures>))| SubjectReport {
                name: subject.name.clone(),
                figures: Figures::medians(rounds),
                lowest_cpu_us: Spread::of(rounds.iter().map(|round| round.cpu_us)).min,
                ratios: (index > 0).then(|| Ratios::new(rounds, &by_subject[0])),
            };
            measured.map(report).collect()
        };
        let case = |(case, by_subject): (&Case, &Vec<Vec<Figures>>)| CaseReport {
            body_bytes: case.body_bytes,
            id: IdPlace::to_string(&case.id),
            subjects: subjects(by_subject),
        };
        let kept = |(subject, homes): (&Subject, &Homes)| {
            let (conversations, upstreams) = (homes.conversations, homes.upstreams.len());
            subject.keeps_homes.then(|| HomesReport { subject: subject.name.clone(), conversations, upstreams })
        };
        Self {
            cpus: std::thread::available_parallelism().map_or(0, usize::from),
            workers: config.workers,
            rounds: config.rounds,
            seconds: config.time.as_secs_f64(),
            connections: config.connections,
            conversations: config.conversations,
            idle_cpus_busy,
            cases: config.cases.iter().zip(figures).map(case).collect(),
            homes: config.subjects.iter().zip(homes).filter_map(kept).collect(),
            aims: aims::of(config, figures),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let first = self.cases.first().and_then(|case| case.subjects.first()).map_or("", |subject| subject.name.as_str());
        writeln!(
            f,
            "Workers: {}. {} connections, {} conversations, {} rounds of {} s; {} CPUs for everything together.",
            self.workers, self.connections, self.conversations, self.rounds, self.seconds, self.cpus
        )?;
        writeln!(f, "Medians over the rounds; x is the median of a round's ratio to `{first}`, with its lowest and highest.")?;
        writeln!(f, "With nothing to do the proxy keeps {:.2} % of a CPU busy.\n", self.idle_cpus_busy * 100.0)?;
        writeln!(
            f,
            "{:<7} {:<6} {:<9} {:>6} {:<18} {:>7} {:<18} {:>7} {:<18} {:>7} {:<18} {:<21} {:>4}",
            "body", "id", "subject", "req/s", "x", "p50 ms", "x", "p99 ms", "x", "CPU us", "x", "more us", "busy"
        )?;
        for case in &self.cases {
            for (index, subject) in case.subjects.iter().enumerate() {
                let size = size(case.body_bytes);
                let (size, id) = if index == 0 { (size.as_str(), case.id.as_str()) } else { ("", "") };
                let figures = &subject.figures;
                let ratio =
                    |of: fn(&Ratios) -> &Spread, digits| subject.ratios.as_ref().map_or(String::new(), |r| text(of(r), digits));
                writeln!(
                    f,
                    "{size:<7} {id:<6} {:<9} {:>6.0} {:<18} {:>7.3} {:<18} {:>7.3} {:<18} {:>7.1} {:<18} {:<21} {:>4.2}",
                    subject.name,
                    figures.requests_per_s,
                    ratio(|r| &r.requests_per_s, 2),
                    figures.p50_us / 1e3,
                    ratio(|r| &r.p50, 2),
                    figures.p99_us / 1e3,
                    ratio(|r| &r.p99, 2),
                    figures.cpu_us,
                    ratio(|r| &r.cpu, 2),
                    ratio(|r| &r.cpu_more_us, 1),
                    figures.cpus_busy,
                )?;
            }
        }
        if !self.homes.is_empty() {
            let kept = |homes: &HomesReport| {
                format!("{} ({} conversations, {} upstreams)", homes.subject, homes.conversations, homes.upstreams)
            };
            let kept: Vec<_> = self.homes.iter().map(kept).collect();
            writeln!(f, "\nEach conversation stayed with its upstream: {}.", kept.join(", "))?;
        }
        aims::write(f, &self.aims)
    }
}

pub(super) fn size(bytes: usize) -> String {
    format!("{} KB", bytes >> 10)
}

pub(super) fn text(spread: &Spread, digits: usize) -> String {
    format!("{:.digits$} ({:.digits$}-{:.digits$})", spread.median, spread.min, spread.max)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(requests_per_s: f64, cpu_us: f64) -> Figures {
        Figures { requests_per_s, p50_us: 100.0, p99_us: 200.0, cpu_us, helper_cpu_us: 0.0, cpus_busy: 1.0 }
    }

    #[test]
    fn ratios_are_taken_within_a_round() {
        // The machine was twice as fast in the second round; the subject costs a quarter more in each.
        let base = [round(1000.0, 40.0), round(2000.0, 20.0), round(1000.0, 40.0)];
        let own = [round(800.0, 50.0), round(1600.0, 25.0), round(800.0, 50.0)];
        let ratios = Ratios::new(&own, &base);
        assert_eq!(ratios.requests_per_s, Spread { median: 0.8, min: 0.8, max: 0.8 });
        assert_eq!(ratios.cpu, Spread { median: 1.25, min: 1.25, max: 1.25 });
        assert_eq!(ratios.cpu_more_us, Spread { median: 10.0, min: 5.0, max: 10.0 });
        assert_eq!(Figures::medians(&base).cpu_us, 40.0);
    }

    #[test]
    fn medians_of_even_counts_lie_between() {
        assert_eq!(Spread::of([4.0, 1.0, 2.0, 3.0].into_iter()), Spread { median: 2.5, min: 1.0, max: 4.0 });
        assert_eq!(Spread::of([7.0].into_iter()), Spread { median: 7.0, min: 7.0, max: 7.0 });
    }
}
